"""Prompts from conversations, weights of records, and mixtures of data sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.config.tables.data import DataConfig
from protos.errors import InvalidInput
from student_trainer.data.prompts import ItemsOfSteps, Prompt, load_prompts
from student_trainer.methods.rl_prompts import load_rl_prompts
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN
from tests.student_trainer import tiny


@pytest.fixture(scope="module")
def chat() -> Any:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    return words


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def talk(number: int, *, answered: bool = True) -> list[dict[str, str]]:
    question = [{"role": "user", "content": f"{number}+1="}]
    return question + [{"role": "assistant", "content": f"{number + 1}"}] * answered


def load(data: DataConfig, words: Any, **changes: Any) -> tuple[ItemsOfSteps[Prompt], list[Prompt]]:
    return load_prompts(data, words, **{"held_out": 2, "max_tokens": 32, "seed": 0, **changes})


def test_the_last_answer_is_the_reference(chat: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"m": talk(n)} for n in range(9)])
    chosen, held_out = load(DataConfig(path=path, messages_column="m"), chat)
    prompts = [*chosen.of_step(1, 7), *held_out]
    assert {prompt.answer for prompt in prompts} == {str(n) for n in range(1, 10)}
    for prompt in prompts:
        question = f"{int(prompt.answer) - 1}+1="
        assert (chat.decode(prompt.ids), prompt.text) == (f"U{question}A", question)


def test_a_column_of_answers_is_the_reference_if_there_is_one(chat: Any, tmp_path: Path) -> None:
    records = [{"m": talk(n), "a": f"final {n}"} for n in range(4)]
    data = DataConfig(
        path=write(tmp_path / "a.jsonl", records), messages_column="m", answer_column="a"
    )
    assert {prompt.answer for prompt in load(data, chat)[0].of_step(1, 2)} < {
        f"final {n}" for n in range(4)
    }


def test_parquet_holds_the_same(chat: Any, tmp_path: Path) -> None:
    records = [{"m": talk(n, answered=n % 2 == 0), "w": n / 2} for n in range(9)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)
    shapes = []
    for file in (str(path), write(tmp_path / "a.jsonl", records)):
        data = DataConfig(path=file, messages_column="m", weight_column="w")
        chosen, _ = load(data, chat)
        shapes.append([(*p.ids, p.answer, p.weight) for p in chosen.of_step(1, 7)])
    assert shapes[0] == shapes[1]


def test_half_a_character_becomes_a_question_mark(chat: Any, tmp_path: Path) -> None:
    """JSON may contain a lone surrogate, which a tokenizer does not accept."""
    conversation = [
        {"role": "user", "content": "1+1\ud83d="},
        {"role": "assistant", "content": "2\udc00"},
    ]
    path = write(
        tmp_path / "a.jsonl", [{"m": conversation, "weight\ud800": 1}, {"m": conversation}]
    )
    chosen, _ = load(DataConfig(path=path, messages_column="m"), chat, held_out=1)
    (prompt,) = chosen.of_step(1, 1)
    assert (prompt.text, prompt.answer) == ("1+1?=", "2?")


def test_a_conversation_that_asks_nothing(chat: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"m": talk(1)}, {"m": talk(2)[1:]}])
    with pytest.raises(InvalidInput, match=r"row 2 of .* has no message before the assistant's"):
        load(DataConfig(path=path, messages_column="m"), chat)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 10**400, "1", True, None, [1]])
def test_weights_that_are_no_numbers(words: Any, tmp_path: Path, weight: Any) -> None:
    records = [{"prompt": "1+1=", "w": 1}, {"prompt": "2+2=", "w": weight}]
    data = DataConfig(path=write(tmp_path / "a.jsonl", records), weight_column="w")
    with pytest.raises(InvalidInput, match=r"^data.weight_column: row 2 of .* has .* column 'w'"):
        load(data, words)


def test_held_out_data_needs_no_weights(words: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "w": 0.5}])
    aside = write(tmp_path / "b.jsonl", [{"prompt": "2+2="}])
    chosen, held_out = load(DataConfig(path=path, eval_path=aside, weight_column="w"), words)
    assert [prompt.weight for prompt in chosen.of_step(1, 2)] == [0.5, 0.5]
    assert [prompt.weight for prompt in held_out] == [1.0]


@pytest.fixture
def mixture(tmp_path: Path) -> DataConfig:
    """Three data sets of 30, 8 and 5 prompts; 2 of the first are held out."""
    paths = []
    for name, sign, count in (("a", "+", 30), ("b", "=", 8), ("c", "+=", 5)):
        records = [{"prompt": f"{n}{sign}", "answer": name} for n in range(count)]
        paths.append(write(tmp_path / f"{name}.jsonl", records))
    mix = [{"path": paths[1], "share": 0.3}, {"path": paths[2], "share": 0.1}]
    return DataConfig.model_validate({"path": paths[0], "mix": mix})


def test_every_step_has_the_shares(mixture: DataConfig, words: Any) -> None:
    chosen, held_out = load(mixture, words)
    steps = [chosen.of_step(step, 10) for step in range(1, 30)]
    for step in steps:
        assert Counter(p.answer for p in step) == {"a": 6, "b": 3, "c": 1}
    assert {p.answer for p in held_out} == {"a"}
    of_b = [tuple(p.ids) for step in steps for p in step if p.answer == "b"]
    for first in range(0, 80, 8):
        assert len(set(of_b[first : first + 8])) == 8, "each epoch of a data set has all of it"


def test_shares_are_met_over_steps_that_they_do_not_divide(mixture: DataConfig, words: Any) -> None:
    chosen, _ = load(mixture, words)
    counts = Counter(p.answer for step in range(1, 101) for p in chosen.of_step(step, 3))
    assert counts == {"a": 180, "b": 90, "c": 30}


def test_a_mixed_step_is_a_pure_function(mixture: DataConfig, words: Any) -> None:
    def keys(prompts: list[Prompt]) -> list[tuple[Any, ...]]:
        return [(*p.ids, p.answer) for p in prompts]

    chosen, _ = load(mixture, words)
    expected = {step: keys(chosen.of_step(step, 7)) for step in range(1, 20)}
    same_chosen, _ = load(mixture, words)
    for step in (19, 3, 11, 3, 1):
        assert keys(same_chosen.of_step(step, 7)) == expected[step]
    other_chosen, _ = load(mixture, words, seed=1)
    assert [keys(other_chosen.of_step(step, 7)) for step in range(1, 4)] != list(expected.values())[
        :3
    ]


def test_the_data_set_of_an_error_is_named(mixture: DataConfig, words: Any) -> None:
    Path(mixture.mix[1].path).write_text('{"prompt": ""}\n')
    with pytest.raises(InvalidInput) as caught:
        load(mixture, words)
    assert caught.value.field == "data.mix.1.path"


def test_conversations_and_mixtures_of_rewards(
    chat: Any, material: tiny.Material, tmp_path: Path
) -> None:
    """RL jobs keep all columns, for rewards and for the anchor's context."""
    for name, numbers in (("a", range(10)), ("b", range(10, 20))):
        write(tmp_path / f"{name}.jsonl", [{"m": talk(n), "hint": name} for n in numbers])
    job = tiny.rl_job(
        material,
        data__path=str(tmp_path / "a.jsonl"),
        data__messages_column="m",
        data__mix=[{"path": str(tmp_path / "b.jsonl"), "share": 0.5}],
        eval__prompts=2,
    )
    training = load_rl_prompts(job, chat).training
    prompts = training.of_step(1, 8)
    assert Counter(prompt.fields["hint"] for prompt in prompts) == {"a": 4, "b": 4}
    for prompt in prompts:
        question = f"{int(prompt.answer) - 1}+1="
        assert (chat.decode(prompt.ids), prompt.text) == (f"U{question}A", question)
        assert prompt.fields["m"][0]["content"] == question
