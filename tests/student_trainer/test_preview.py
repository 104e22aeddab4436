"""The preview of each method, by sequences written by hand, and faults that it must show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from clients.config.kinds import AnyTraining
from clients.config.on_policy import OnPolicyJob
from clients.data.preview import Preview, parse_preview
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from protos.errors import InvalidInput
from student_trainer.assembly import assemble
from student_trainer.data.examples import load_examples
from student_trainer.model.loading import load_tokenizer
from student_trainer.preview import preview_of
from tests.clients.data.test_prompt_format import CHARACTERS, MARKED
from tests.student_trainer import tiny
from tests.student_trainer.methods.test_sft import trainer_of
from tests.student_trainer.small_store import sums, write_store

CALL = {"type": "function", "function": {"name": "SUA", "arguments": {"n": "42"}}}
WITH_CALLS = MARKED.replace(
    "{{ m.content }}{% endgen",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | string }}{% endfor %}"
    "{% endgen",
)


def texts(preview: Preview, record: int = 0) -> list[str]:
    """Return each view of a record; learned tokens in brackets, sampled ones in angle brackets."""
    brackets = {"learned": "[]", "end": "[]", "sampled": "<>"}
    lines = []
    for view in preview.records[record].views:
        line = f"{view.reader}: "
        for run in view.runs:
            opening, closing = brackets.get(run.kind, ("", ""))
            line += opening + "".join(run.texts) + closing
        lines.append(line.replace("][", ""))
    return lines


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


MakeJob = Callable[..., AnyTraining]


@pytest.fixture
def chat_job(material: tiny.Material, tmp_path: Path) -> MakeJob:
    """Returns a function that makes a job for conversations and a chat template."""

    def make_job(template: str, messages: Sequence[Any], **changes: Any) -> AnyTraining:
        words = tiny.tokenizer(CHARACTERS)
        words.chat_template = template
        model = tiny.model(characters=CHARACTERS)
        student = tiny.save(model, words, tmp_path / "student")
        path = write(tmp_path / "talk.jsonl", [{"m": messages}] * 9)
        chats = tiny.Material(Path(path), material.teacher, student)
        options = {"data__messages_column": "m", "method__max_tokens": 512, "eval__prompts": 2}
        return tiny.sft_job(chats, **options | changes)

    return make_job


def talk(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[n % 2], **(content if isinstance(content, dict) else {"content": content})}
        for n, content in enumerate(contents)
    ]


def test_sft(material: tiny.Material, tmp_path: Path) -> None:
    records = [{"prompt": "12+3=", "answer": "15"}, {"prompt": "1=", "answer": ""}]
    config = tiny.sft_job(material, data__path=write(tmp_path / "a.jsonl", records))
    preview = preview_of(config)
    assert texts(preview) == ["student: 12+3=[15<|end|>]"]
    assert preview.records[1].problem == "left out: records without an answer to learn"
    assert "1 of 2 records (50%) are left out, so the job will fail" in preview.warnings[0]
    assert ("end tokens", "<|end|> (id 0)") in preview.facts


def test_records_of_each_data_set(material: tiny.Material, tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{n}.jsonl", [{"prompt": f"{n}=", "answer": str(n)}] * 2)
        for n in (1, 2, 3)
    ]
    mix = [{"path": path, "share": 0.25} for path in paths[1:]]
    preview = preview_of(tiny.sft_job(material, data__path=paths[0], data__mix=mix), shown=9)
    assert [record.where for record in preview.records] == [
        f"row {row} of {path}" for path in paths for row in (1, 2)
    ]


@pytest.mark.parametrize(("count", "mixed"), [(40, False), (40, True), (1500, False)])
def test_epochs_are_the_steps_that_training_makes(
    material: tiny.Material, tmp_path: Path, count: int, mixed: bool
) -> None:
    """Every fourth record is left out; an epoch has each of the others once."""
    records = [{"prompt": f"{n}=", "answer": str(n) if n % 4 else ""} for n in range(count)]
    path = write(tmp_path / "a.jsonl", records)
    changes: dict[str, Any] = {"data__path": path, "data__max_left_out": 0.5}
    if mixed:
        other = write(tmp_path / "b.jsonl", [{"prompt": "1=", "answer": "1"}] * 3)
        changes["data__mix"] = [{"path": other, "share": 0.5}]
    config = tiny.sft_job(material, **changes, eval__prompts=5)
    config = config.model_copy(update={"epochs": 2.5, "max_steps": 0})
    training, _ = load_examples(config, load_tokenizer(config.student))
    size = training.epoch_size
    if count == 40:
        assert size == 25 * (1 + mixed)
        first, second = (training.of_step(step, size) for step in (1, 2))
        assert {id(item) for item in first} == {id(item) for item in second}
    else:
        assert abs(size - (1125 - 5)) < 50, "estimated from 1,000 of 1,500 records"
    fact = f"{math.ceil(2.5 * size / 8):,}: 2.5 epochs of {size:,} records"
    assert ("steps", fact) in preview_of(config).facts


def test_on_policy_and_what_the_teacher_reads(chat_job: MakeJob) -> None:
    config = chat_job(MARKED, talk("1+1=", "2"))
    values = config.model_dump(include={"student", "data", "eval"}, exclude_unset=True)
    config = OnPolicyJob.model_validate(
        {
            **values,
            "teacher": {"address": "localhost:1", "context": "{answer}+"},
            "method": {"max_new_tokens": 6},
        }
    )
    sampled = "<the student samples at most 6 tokens here>"
    preview = preview_of(config)
    assert texts(preview) == [f"student: U1+1=A{sampled}", f"teacher: U2+1+1=A{sampled}"]
    assert not preview.warnings
    assert ("sampled", "at most 6 tokens an answer") in preview.facts


def test_a_teacher_with_another_chat_template_is_seen(chat_job: MakeJob, tmp_path: Path) -> None:
    """Before the job starts if the teacher is a directory, otherwise when it starts."""
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = MARKED.replace("{{ m.role[0] | upper }}", "T")
    teacher = tiny.save(tiny.model(characters=CHARACTERS), words, tmp_path / "teacher")
    config = chat_job(MARKED, talk("1+1=", "2"))
    values = config.model_dump(include={"student", "data", "eval"}, exclude_unset=True)
    values |= {"teacher": {"model": str(teacher)}, "method": {"max_new_tokens": 6}}
    (warning,) = preview_of(OnPolicyJob.model_validate(values)).warnings
    assert warning.startswith("the chat templates of student and teacher differ: after '' the")
    assert "set student.chat_template = 'teacher'" in warning
    assert preview_of(OnPolicyJob.model_validate(values), warnings=["x"]).warnings == ("x",)


def test_the_chat_template_of_the_teacher(material: tiny.Material) -> None:
    config = tiny.job(material, student__chat_template="teacher")
    warning = "prompts are in the student's own chat template"
    assert any(line.startswith(warning) for line in preview_of(config).warnings)
    words = tiny.tokenizer()
    words.chat_template = "{% for m in messages %}9{{ m.content }}{% endfor %}"
    preview = preview_of(config, tokenizer=words)
    assert texts(preview)[0].startswith("student: 9")
    assert not any(line.startswith(warning) for line in preview.warnings)


def test_rl_and_what_the_anchor_reads(material: tiny.Material) -> None:
    config = tiny.rl_job(material, anchor__context="{answer}=")
    first = json.loads(material.prompts.read_text().splitlines()[0])
    sampled = "<the student samples at most 6 tokens here>"
    assert texts(preview_of(config)) == [
        f"student: {first['prompt']}{sampled}",
        f"anchor: {first['answer']}={first['prompt']}{sampled}",
    ]


def test_offline(material: tiny.Material, tmp_path: Path) -> None:
    """The last sequence has no end token, as one that the teacher's limit has cut."""
    model = AutoModelForCausalLM.from_pretrained(material.teacher)
    sequences = sums(12)
    sequences[-1] = (sequences[-1][0][:-1], sequences[-1][1])
    store = write_store(tmp_path / "store", model, sequences)
    config = tiny.offline_job(material, store, eval__prompts=2)
    config = config.model_copy(update={"epochs": 2.0, "max_steps": 0})
    preview = preview_of(config, shown=2)
    assert ("steps", "3: 2 epochs of 10 stored sequences") in preview.facts
    words = tiny.tokenizer()
    ids, start = sequences[1]
    assert texts(preview, 1) == [
        f"student: {words.decode(ids[:start])}[{words.decode(ids[start:])}]"
    ]
    assert len(preview.records) == 2
    assert "1 of 12 learned parts do not end with an end token" in preview.warnings[0]


def test_all_answers_and_flags(chat_job: MakeJob) -> None:
    messages = talk("1+1=", {"content": "2", "weight": 0}, "2+2=", "4")
    preview = preview_of(chat_job(MARKED, messages, method__train_on="all"))
    assert texts(preview) == ["student: U1+1=A2<|end|>U2+2=A[4<|end|>]"]


def test_a_wrong_mask_is_seen(chat_job: MakeJob) -> None:
    """The template marks the user's messages: the answers are context, and no end is learned."""
    template = (
        "{% for m in messages %}{{ m.role[0] | upper }}{% if m.role == 'user' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}"
    )
    preview = preview_of(chat_job(template, talk("1+1=", "2"), method__train_on="all"))
    assert texts(preview) == ["student: U[1+1=<|end|>]"]
    (warning,) = preview.warnings
    assert warning.startswith("a user message is learned in 9 of 9 records; check the roles")


def test_a_missing_end_token_is_seen(chat_job: MakeJob) -> None:
    """An answer before the last one ends without an end token."""
    template = MARKED.replace("{% endgeneration %}<|end|>", "{% endgeneration %}")
    preview = preview_of(chat_job(template, talk("1+1=", "2", "2+2=", "4"), method__train_on="all"))
    assert texts(preview) == ["student: U1+1=A[2]U2+2=A[4<|end|>]"]
    assert "9 of 18 learned parts do not end with an end token" in preview.warnings[0]


def test_a_system_message_that_is_left_out_is_seen(chat_job: MakeJob) -> None:
    template = MARKED.replace("for m in messages", "for m in messages if m.role != 'system'")
    messages = [{"role": "system", "content": "N"}, *talk("1+1=", "2")]
    config = chat_job(template, messages)
    preview = preview_of(config)
    assert preview.warnings[0] == "9 of 9 records are refused, so the job will fail"
    assert "drops the system message of row 1" in preview.records[0].problem
    assert preview.records[0].lost == (("system message", "N"),)


def test_arguments_of_a_tool_call_that_are_left_out_are_seen(chat_job: MakeJob) -> None:
    """Training does not refuse them: the name of the function is there."""
    template = WITH_CALLS.replace("c.function | string", "c.function.name")
    messages = talk("1+1=", {"content": None, "tool_calls": [CALL]})
    preview = preview_of(chat_job(template, messages))
    assert texts(preview) == ["student: U1+1=A[SUA<|end|>]"]
    assert preview.records[0].lost == (("tool call", "42"),)
    assert "a tool call is missing from the input in 9 of 9 records" in preview.warnings


def test_a_control_token_inside_an_answer_is_seen(chat_job: MakeJob) -> None:
    preview = preview_of(chat_job(MARKED, talk("1+1=", "2<|end|>4")))
    assert len(preview.warnings) == 1
    assert preview.warnings[0].startswith(
        "the text '<|end|>' in 9 of 9 records is read as these characters, not as the control token"
    )
    note = "read as characters, not as control tokens: <|end|>"
    assert {record.problem for record in preview.records} == {note}


def test_a_run_has_the_preview_also_if_its_data_is_refused(
    material: tiny.Material, tmp_path: Path
) -> None:
    records = [{"prompt": "1+1=", "answer": "2" if n % 4 else ""} for n in range(40)]
    path = write(tmp_path / "a.jsonl", records)
    config = tiny.sft_job(material, data__path=path, eval__prompts=2)
    with (
        pytest.raises(InvalidInput, match=r"data.path: \d+ of \d+ records \(2\d%\) are left out: "),
        trainer_of(tmp_path / "run", config),
    ):
        pass
    preview = parse_preview(RunDirectory(tmp_path / "run").preview.read_text())
    assert texts(preview, 1) == ["student: 1+1=[2<|end|>]"]
    assert "10 of 40 records (25%) are left out, so the job will fail" in preview.warnings[0]
    config = tiny.sft_job(material, data__path=path, eval__prompts=2, data__max_left_out=0.3)
    with trainer_of(tmp_path / "other", config):
        pass
    write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "3"}] * 40)
    run = RunDirectory(tmp_path / "run")  # the next attempt, with mended data
    progress = Progress(run, attempt=2, max_steps=9, main=True, terminated=lambda: False)
    trainer = assemble(config, run, {}, progress, 2, None)
    assert trainer.metrics is not None
    trainer.metrics.close()
    preview = parse_preview(run.preview.read_text())
    assert texts(preview, 1) == ["student: 1+1=[3<|end|>]"]
    assert not any("left out" in warning for warning in preview.warnings)


@pytest.mark.parametrize("bad", ["data.mix.0.path", "data.eval_path"])
def test_every_data_set_is_judged_as_training_judges_it(
    bad: str, material: tiny.Material, tmp_path: Path
) -> None:
    """The records of a mix, and those that are held out."""
    sums = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
    path = write(tmp_path / "a.jsonl", sums)
    other = write(tmp_path / "b.jsonl", [{"prompt": "1+1=", "answer": ""}] * 3 + sums[:1])
    place = {"data__mix": [{"path": other, "share": 0.5}]}
    if bad == "data.eval_path":
        place = {"data__eval_path": other}  # type: ignore[dict-item]
    config = tiny.sft_job(material, data__path=path, **place)
    preview = preview_of(config, shown=8)
    assert ("records", "7 of 10 are used") in preview.facts
    assert [bool(record.problem) for record in preview.records] == [False] * 6 + [True] * 2
    sentence = "3 of 4 records (75%) are left out"
    reasons = "3 records without an answer to learn"
    assert preview.warnings[0] == f"{bad}: {sentence}, so the job will fail: {reasons}"
    with pytest.raises(InvalidInput, match="^" + re.escape(f"{bad}: {sentence}: {reasons};")):
        load_examples(config, load_tokenizer(config.student))


def test_a_large_data_set_is_judged_by_the_records_that_training_judges(
    material: tiny.Material, tmp_path: Path
) -> None:
    """The first 1,000 of 1,500 records are good, the last 500 are not."""
    records = [{"prompt": "1+1=", "answer": "2" if n < 1000 else ""} for n in range(1500)]
    config = tiny.sft_job(material, data__path=write(tmp_path / "a.jsonl", records))
    preview = preview_of(config)
    (share,) = re.findall(r"^(\d+ of 1,000 records) .* so the job will fail", preview.warnings[0])
    assert 250 < int(share.split()[0]) < 420
    with pytest.raises(InvalidInput, match=rf"^data.path: {share} \("):
        load_examples(config, load_tokenizer(config.student))


@pytest.mark.parametrize(
    "message", [{"speaker": "human", "value": "1"}, {"role": "user", "content": ["1"]}]
)
def test_a_row_without_messages_is_shown_as_refused(
    chat_job: MakeJob, tmp_path: Path, message: dict[str, Any]
) -> None:
    """It is behind the first records, which are checked before the program starts."""
    config = chat_job(MARKED, talk("1+1=", "2"))
    with (tmp_path / "talk.jsonl").open("a") as file:
        file.write(json.dumps({"m": [message, {"role": "assistant", "content": "1"}]}) + "\n")
    preview = preview_of(config, shown=10)
    assert preview.records[9].problem.startswith("refused: ")
    assert "1 of 10 records are refused, so the job will fail" in preview.warnings
