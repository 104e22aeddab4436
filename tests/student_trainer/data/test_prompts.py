"""Selection and order of prompts, and unusable data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.config.sft import SFTJob
from clients.config.tables.data import DataConfig
from clients.data.conversation import Conversation
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from student_trainer.data import prompts, record_table
from student_trainer.data.examples import load_examples
from student_trainer.data.order import permutation
from student_trainer.data.prompts import ModelIds, Prompt, PromptSet, load_prompts
from student_trainer.data.records import PromptRecord, RecordReader
from tests.student_trainer import tiny

PAIRS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(path=write(tmp_path / "data.jsonl", PAIRS))


def load(data: DataConfig, words: Any, **changes: int) -> tuple[PromptSet, list[Prompt]]:
    return load_prompts(data, words, **{"held_out": 5, "max_tokens": 16, "seed": 0, **changes})


def keys(prompts: list[Prompt]) -> list[tuple[Any, ...]]:
    return [(*prompt.ids, prompt.answer) for prompt in prompts]


def texts(words: Any, prompts: list[Prompt]) -> list[str]:
    return [words.decode(prompt.ids) for prompt in prompts]


def test_an_epoch_visits_each_prompt_once(data: DataConfig, words: Any) -> None:
    chosen, _ = load(data, words)
    walk = [prompt for step in range(1, 51) for prompt in chosen.of_step(step, 4)]
    epochs = [walk[first : first + 25] for first in range(0, 200, 25)]
    for epoch in epochs:
        assert len({p.answer for p in epoch}) == 25
    assert len({tuple(p.answer for p in epoch) for epoch in epochs}) == 8, "in another order"


def test_a_step_is_a_pure_function(data: DataConfig, words: Any) -> None:
    chosen, _ = load(data, words)
    expected = {step: keys(chosen.of_step(step, 7)) for step in range(1, 20)}
    same_chosen, _ = load(data, words)
    for step in (19, 3, 11, 3, 1):
        assert keys(same_chosen.of_step(step, 7)) == expected[step]
    other_chosen, _ = load(data, words, seed=1)
    assert [keys(other_chosen.of_step(step, 7)) for step in range(1, 4)] != list(expected.values())[
        :3
    ]


def test_held_out_prompts_are_never_trained_on(data: DataConfig, words: Any) -> None:
    chosen, held_out = load(data, words)
    assert len(held_out) == 5
    trained_answers = {
        prompt.answer for step in range(1, 100) for prompt in chosen.of_step(step, 4)
    }
    held_out_answers = {prompt.answer for prompt in held_out}
    assert trained_answers | held_out_answers == {pair["answer"] for pair in PAIRS}
    assert not trained_answers & held_out_answers


def test_a_file_of_held_out_prompts(data: DataConfig, words: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "held.jsonl", [{"prompt": f"{n}+9=", "answer": ""} for n in range(9)])
    chosen, held_out = load(data.model_copy(update={"eval_path": path}), words)
    assert len({prompt.answer for prompt in chosen.of_step(1, 30)}) == 30
    assert len(held_out) == 5
    assert all(text.endswith("+9=") for text in texts(words, held_out))


def test_long_prompts_are_left_out_and_counted(
    data: DataConfig, words: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """10 of 30 prompts are short enough: 5 are held out, and each epoch has the other 5."""
    data = data.model_copy(update={"max_left_out": 1.0})
    chosen, held_out = load(data, words, max_tokens=4)
    epochs = [{p.answer for p in chosen.of_step(step, 5)} for step in range(1, 5)]
    assert all(epoch == epochs[0] for epoch in epochs)
    assert epochs[0] | {p.answer for p in held_out} == {str(n + 1) for n in range(10)}
    messages = [message for message in caplog.messages if message.startswith("left out so far")]
    counts = [int(message.split()[4]) for message in messages]
    assert counts == [1, 2, 4, 8, 16], "all 20 have been met"
    same_chosen, _ = load(data, words, max_tokens=4)
    assert keys(same_chosen.of_step(90, 3)) == keys(
        [chosen.of_step(267 + n, 1)[0] for n in (1, 2, 3)]
    )


def test_a_record_of_megabytes_is_left_out_without_its_tokens(
    data: DataConfig, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer needs gigabytes for 40 million characters."""
    encode, read_characters = PromptFormat.ids, []

    def ids(self: PromptFormat, tokenizer: Any, conversation: Any, where: str = "") -> list[int]:
        read_characters.append(conversation.characters)
        return encode(self, tokenizer, conversation, where)

    monkeypatch.setattr(PromptFormat, "ids", ids)
    path = tmp_path / "huge.jsonl"
    huge_line = json.dumps({"prompt": "1+" * (1 << 20), "answer": "1"})
    path.write_text("\n".join([*Path(data.path).read_text().splitlines(), huge_line]))
    chosen, _ = load(data.model_copy(update={"path": str(path)}), words)
    assert len({prompt.answer for prompt in chosen.of_step(1, 25)}) == 25
    assert 0 < max(read_characters) < 100


def test_more_records_are_left_out_than_a_job_allows(data: DataConfig, words: Any) -> None:
    """20 of 30 prompts are too long; those that precede a held-out one are not counted again."""
    with pytest.raises(
        InvalidInput,
        match=r"^data.path: (\d+) of \d+ records \(\d\d%\) are left out: \1 prompts longer"
        r" than method.max_prompt_tokens = 4; correct .* data.max_left_out, which is 0.2",
    ):
        load(data, words, max_tokens=4)


def test_the_order_is_that_of_all_prompts_at_once(data: DataConfig, words: Any) -> None:
    """Prompts of a step follow from the permutations alone, tokenized lazily or not."""
    everything = [pair["answer"] for pair in PAIRS]
    mixed = [everything[i] for i in permutation(30, 0, -1)]
    chosen, held_out = load(data, words)
    assert [prompt.answer for prompt in held_out] == mixed[:5]
    order = [mixed[5:][i] for epoch in range(3) for i in permutation(25, 0, epoch)]
    for step in (8, 1, 2, 10):
        assert [p.answer for p in chosen.of_step(step, 7)] == order[7 * (step - 1) : 7 * step]


@pytest.mark.parametrize("max_tokens", [4, 16], ids=["some left out", "all fit"])
def test_skipped_steps_do_not_restart_an_epoch(
    data: DataConfig, words: Any, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Rounds of dynamic sampling skip steps (1, 4, 7, 8, 10, ...); each epoch is permuted once."""
    data = data.model_copy(update={"max_left_out": 1.0})
    one_by_one, _ = load(data, words, max_tokens=max_tokens)
    expected = [keys(one_by_one.of_step(step, 3)) for step in range(1, 41)]
    epochs: list[int] = []

    def record_epoch(size: int, seed: int, epoch: int, directory: Path | None) -> Any:
        epochs.append(epoch)
        return permutation(size, seed, epoch, directory)

    chosen, _ = load(data, words, max_tokens=max_tokens)
    monkeypatch.setattr(prompts, "permutation", record_epoch)
    for step in (1, 4, 7, 8, 10, 11, 12, 13, 16, 19, 22, 23, 25, 28, 29, 31, 34, 37, 40):
        assert keys(chosen.of_step(step, 3)) == expected[step - 1]
    assert epochs == list(range(epochs[-1] + 1))
    assert len(epochs) == (24 if max_tokens == 4 else 5), "40 steps of 3 are so many epochs"
    assert keys(chosen.of_step(39, 3)) == expected[38], "backwards too"


def test_only_prompts_that_are_needed_are_tokenized(
    data: DataConfig, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[str] = []

    ids = PromptFormat.ids

    def record_question(
        form: PromptFormat, tokenizer: Any, conversation: Conversation, where: str
    ) -> list[int]:
        questions.append(conversation.question)
        return ids(form, tokenizer, conversation, where)

    monkeypatch.setattr(PromptFormat, "ids", record_question)
    monkeypatch.setattr(prompts, "SURVEY", 1)
    chosen, _ = load(data, words)
    assert len(questions) == 7, "5 held out, one of the survey, and one for training"
    for _ in range(2):
        chosen.of_step(1, 4)
    chosen.of_step(2, 4)
    assert len(questions) == len(set(questions)) == 5 + 8 + 1, "the survey's row is none of them"


def test_template_and_columns(words: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"q": f"{n}", "a": n} for n in range(9)])
    data = DataConfig(path=path, prompt_column="q", answer_column="a", template="1+{prompt}=")
    chosen, held_out = load(data, words)
    for prompt in [*chosen.of_step(1, 4), *held_out]:
        assert words.decode(prompt.ids) == f"1+{prompt.answer}="


def test_a_chat_template_is_used(data: DataConfig) -> None:
    chat = tiny.tokenizer()
    chat.chat_template = (
        "{% for m in messages %}={{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}+{% endif %}"
    )
    chosen, _ = load(data, chat)
    for prompt in chosen.of_step(1, 25):
        assert chat.decode(prompt.ids) == f"={int(prompt.answer) - 1}+1=+"


def test_an_end_token_does_not_end_a_prompt(data: DataConfig) -> None:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 0)]
    )
    assert words("1+1=")["input_ids"][-1] == 0
    chosen, _ = load(data, words)
    assert all(0 not in prompt.ids for prompt in chosen.of_step(1, 25))


def test_parquet(data: DataConfig, words: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "data.parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist(PAIRS), path)
    chosen, held_out = load(DataConfig(path=path), words)
    expected_chosen, expected_held_out = load(data, words)
    assert keys(chosen.of_step(1, 25)) == keys(expected_chosen.of_step(1, 25))
    assert keys(held_out) == keys(expected_held_out) != []


@pytest.mark.parametrize(
    ("lines", "field", "says"),
    [
        (['{"question": "1"}'], "data.prompt_column", "it has question"),
        (['{"prompt": "1"}', "{"], "data.path", "data.jsonl:2 is not JSON"),
        (['{"prompt": "1"}', "[1, 2]"], "data.path", "data.jsonl:2 is not a JSON object"),
        (["3"], "data.path", "data.jsonl:1 is not a JSON object"),
        (['{"prompt": ""}'], "data.path", ""),
        (['{"prompt": "1"}'] * 5, "eval.prompts", "leaves no training record: the data have 5"),
        ([], "data.path", "the data has no prompt that can be used"),
    ],
)
def test_bad_data(tmp_path: Path, words: Any, lines: list[str], field: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(InvalidInput) as caught:
        load(DataConfig(path=str(path)), words)
    assert says in caught.value.message
    assert caught.value.field == field
    assert caught.value.hint


def test_the_held_out_file_is_named(data: DataConfig, tmp_path: Path, words: Any) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text("{\n")
    with pytest.raises(InvalidInput) as caught:
        load(data.model_copy(update={"eval_path": str(path)}), words)
    assert caught.value.field == "data.eval_path"


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_token_without_an_embedding_is_refused_before_the_first_step(
    kind: str, tmp_path: Path
) -> None:
    """One of the tokenizer only, as [PAD]; where no text uses it, nothing is refused."""
    words = tiny.tokenizer()
    ids = ModelIds.of_tokenizer(words, len(words))
    assert ids == ModelIds(len(words))
    words.add_special_tokens({"pad_token": "[PAD]"})
    ids = ModelIds.of_tokenizer(words, len(words) - 1)

    def load(prompt: str) -> object:
        path = write(tmp_path / "data.jsonl", [*PAIRS, {"prompt": prompt, "answer": "2"}])
        if kind == "rl":
            data = DataConfig(path=path)
            return load_prompts(data, words, held_out=1, max_tokens=16, seed=0, model_ids=ids)
        job = {"student": {"model": "s"}, "data": {"path": path}, "method": {"type": "sft"}}
        return load_examples(SFTJob.model_validate(job | {"eval": {"prompts": 1}}), words, ids)

    load("1+1=")
    with pytest.raises(InvalidInput, match=rf"has the token '\[PAD\]' \(id {len(words) - 1}\)"):
        load("1+[PAD]=")


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that were tokenized."""
    questions: list[str] = []
    ids = PromptFormat.ids

    def record_question(
        form: PromptFormat, tokenizer: Any, conversation: Conversation, where: str
    ) -> list[int]:
        questions.append(conversation.question)
        return ids(form, tokenizer, conversation, where)

    monkeypatch.setattr(PromptFormat, "ids", record_question)
    return questions


@pytest.mark.parametrize("step", [2, 40, 10**9])
def test_a_resumed_job_tokenizes_only_what_it_needs(
    data: DataConfig, words: Any, tokenized: list[str], step: int
) -> None:
    """20 of 30 prompts are left out. The earlier attempt has met all of them."""
    data = data.model_copy(update={"max_left_out": 1.0})
    chosen, held_out = load(data, words, max_tokens=4)
    expected = keys(chosen.of_step(step, 3))
    tokenized.clear()
    resumed, same_held_out = load(data, words, max_tokens=4)
    assert keys(same_held_out) == keys(held_out)
    assert keys(resumed.of_step(step, 3)) == expected
    assert len(tokenized) <= 5 + 3, "the held-out prompts, and those of the step"


def test_a_resume_without_the_cache_has_the_same_prompts(
    data: DataConfig, words: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any, tmp_path: Path
) -> None:
    """As on another machine, or after `distill cache --clear`: told, and tokenized again."""
    caplog.set_level("INFO")
    monkeypatch.setattr(prompts, "SURVEY", 1)
    chosen, _ = load(data, words)
    expected = keys([prompt for step in range(1, 7) for prompt in chosen.of_step(step, 4)][20:])
    assert "records of earlier steps" not in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    resumed, _ = load(data, words)
    monkeypatch.setattr(prompts, "_MAX_SKIP", 1)
    assert keys(resumed.of_step(6, 4)) == expected
    assert re.search(r"tokenizing \d+ records of earlier steps, because it is not", caplog.text)


def test_records_are_checked_once(
    data: DataConfig, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(data, words)
    checked: list[str] = []
    build_record = RecordReader.build_record

    def record_place(reader: RecordReader, record: Any, where: str, folder: Path) -> PromptRecord:
        checked.append(where)
        return build_record(reader, record, where, folder)

    monkeypatch.setattr(RecordReader, "build_record", record_place)
    load(data, words)
    assert len(checked) == 5, "only the held-out prompts are read"
    load(data, words, max_tokens=15)
    assert len(checked) >= 5 + 30, "another limit may leave out other records"


def test_the_items_in_memory_are_bounded(
    data: DataConfig, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, _ = load(data, words)
    expected = [keys(chosen.of_step(step, 4)) for step in range(1, 20)]
    monkeypatch.setattr(record_table, "_MAX_ITEMS", 3)
    chosen, _ = load(data, words)
    assert [keys(chosen.of_step(step, 4)) for step in range(1, 20)] == expected
    assert len(chosen._table._items) == 3
