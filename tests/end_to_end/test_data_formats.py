"""Forty data files: layouts and formats that people have, through every reader of records.

A file is read rightly, so that its tokens are those of its source in Python, or it is refused with
the field and a remedy.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob, ExamConfig
from clients.config.kinds import AnyJob
from clients.config.on_policy import OnPolicyJob
from clients.config.sft import SFTJob
from clients.preflight.columns import with_columns
from clients.preflight.data_files import check_data
from clients.preflight.limits import fit_limits
from protos.errors import InvalidInput
from student_trainer.data.examples import load_examples
from student_trainer.data.prompts import load_prompts
from student_trainer.exam.questions import load_questions
from teacher_service.capture.sequences import SequenceReader
from tests.student_trainer import tiny

Record = Mapping[str, Any]

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\u00e9\u20ac"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = ["007", 'She said "hi", twice', "two\nlines", "caf\u00e9, 3 \u20ac", "1 + 1 = ?"]
# Question, input of Alpaca, and answer.
PARTS = [(q, f"input {n}" if n % 2 else "", f"{n:03}, ok") for n, q in enumerate(QUESTIONS * 6)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Each layout: the record of (question, input, answer).
LAYOUTS: dict[str, Callable[[str, str, str], Record]] = {
    "answer": lambda q, _, a: {"id": q, "prompt": q, "answer": a},
    "TRL": lambda q, _, a: {"prompt": q, "completion": a},
    "Alpaca": lambda q, i, a: {"instruction": q, "input": i, "output": a},
    "messages": lambda q, _, a: {"messages": [user(q), assistant(a)]},
    "TRL messages": lambda q, _, a: {"prompt": [user(q)], "completion": [assistant(a)]},
    "ShareGPT": lambda q, _, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
}


def lines_of(records: Sequence[Record]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write_csv(path: Path, records: Sequence[Record], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)


def write_zstd(path: Path, content: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(content)


def write(path: Path, records: Sequence[Record]) -> None:
    """Write records in the format of the file's suffix, by other code than the product's."""
    lines = lines_of(records)
    match path.name.split(".", 1)[1]:
        case "jsonl" | "lines.json":
            path.write_bytes(lines)
        case "json":
            path.write_text(json.dumps(records, indent=1), encoding="utf-8-sig")
        case "csv":
            write_csv(path, records)
        case "semicolons.csv":
            write_csv(path, records, ";")
        case "parquet":
            pa.parquet.write_table(pa.Table.from_pylist([*records]), path, row_group_size=7)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines[:99]) + gzip.compress(lines[99:]))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(records).encode()))
        case "jsonl.zst":
            write_zstd(path, lines)
        case "csv.zst":
            write_csv(path.with_suffix(""), records)
            write_zstd(path, path.with_suffix("").read_bytes())
            path.with_suffix("").unlink()
        case "*.jsonl":
            for part in range(3):
                lines = lines_of(records[part * 10 : part * 10 + 10])
                path.with_name(f"data.{part}.jsonl").write_bytes(lines)


SUFFIXES = ["jsonl", "lines.json", "json", "csv", "semicolons.csv", "parquet"]
SUFFIXES += ["jsonl.gz", "json.gz", "jsonl.zst", "csv.zst", "*.jsonl"]
TEXTS = [(layout, suffix) for layout in ("TRL", "Alpaca") for suffix in SUFFIXES]
TALKS = [
    (layout, suffix)
    for layout in ("messages", "TRL messages", "ShareGPT")
    for suffix in ("jsonl", "json", "parquet", "jsonl.zst")
]
READ = [*TEXTS, *TALKS, ("answer", "csv"), ("answer", "*.jsonl")]


def make_training(path: str, **data: Any) -> SFTJob:
    return SFTJob.model_validate(
        {
            "student": {"model": "some/student"},
            "method": {"type": "sft"},
            "eval": {"prompts": 2},
            "data": {"path": path, **data},
        }
    )


def make_jobs(path: str) -> list[AnyJob]:
    """Return a job of each method that reads records and answers."""
    student, data = {"student": {"model": "some/student"}}, {"data": {"path": path}}
    teacher = {"teacher": {"address": "localhost:1"}}
    evaluation = {"eval": {"prompts": 2, "metric": "exact_match"}}
    exam = {"method": {"type": "eval"}, "reward": {"type": "exact_match"}}
    return [
        OnPolicyJob.model_validate({**student, **teacher, **evaluation, **data}),
        make_training(path),
        CaptureJob.model_validate({**teacher, "method": {"type": "capture"}, **data}),
        EvalJob.model_validate({**student, **exam, **data}),
    ]


@cache
def make_chat() -> Any:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = TEMPLATE
    return words


def read_texts(job: AnyJob) -> list[str]:
    """Return the text of every record as the job's program tokenizes it; exact for these tokens."""
    chat = make_chat()
    if isinstance(job, EvalJob):
        values = {key: getattr(job, key) for key in ("method", "reward", "data", "seed")}
        exam = ExamConfig(models={"student": "some/student"}, out="out", **values)
        questions = load_questions(with_columns(exam))
        return [
            chat.apply_chat_template(
                [*question.conversation.messages, assistant(question.reference)], tokenize=False
            )
            for question in questions
        ]
    check_data(job)
    job = fit_limits(job).apply(job)
    if isinstance(job, CaptureJob):
        sequences = SequenceReader(job.data, chat, 4096, 1)
        return [chat.decode(sequence.token_ids) for sequence in sequences]
    if isinstance(job, SFTJob):
        training, held_out = load_examples(job, chat)
        examples = [*training.of_step(1, len(PARTS) - 2), *held_out]
        return [chat.decode(example.token_ids) for example in examples]
    assert isinstance(job, OnPolicyJob)
    steps, rest = load_prompts(job.data, chat, held_out=2, seed=0, max_tokens=4096)
    prompts = [*steps.of_step(1, len(PARTS) - 2), *rest]
    return [f"{chat.decode(prompt.ids)}{prompt.answer}<|end|>" for prompt in prompts]


def expected_texts(layout: str) -> list[str]:
    questions = [f"{q}\n{more}" if layout == "Alpaca" and more else q for q, more, _ in PARTS]
    return [
        f"<user>{question}<assistant>{answer}<|end|>"
        for question, (*_, answer) in zip(questions, PARTS, strict=True)
    ]


@pytest.mark.parametrize(("layout", "suffix"), READ, ids=lambda value: value)
def test_a_file_is_read_rightly_by_every_reader(layout: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    write(path, [LAYOUTS[layout](*parts) for parts in PARTS])
    for job in make_jobs(str(path)):
        assert sorted(read_texts(job)) == sorted(expected_texts(layout)), job.method.type


def test_what_was_recognised_is_in_the_values_of_the_job(tmp_path: Path) -> None:
    write(tmp_path / "data.csv", [LAYOUTS["Alpaca"](*parts) for parts in PARTS])
    limits = str(fit_limits(make_jobs(str(tmp_path / "data.csv"))[1]))
    assert limits.startswith(
        "data.prompt_column = instruction; data.input_column = input; data.answer_column = output"
        " (instruction, input and output (Alpaca))"
    )


BOTH = {"prompt": "1", "completion": "2", "messages": [user("3"), assistant("4")]}
ANSWERS = {"prompt": "1", "completion": "2", "answer": "3"}
# File: its content, the start of the error (a regular expression), keys that the error names, and
# the text of the first record with these keys; "": the file is broken.
REFUSED: dict[str, tuple[bytes, str, dict[str, str], str]] = {
    "prompt-or-messages.jsonl": (
        lines_of([BOTH] * 30),
        r"data.path: \S+ can be read in [23] ways: as conversations \(the first is '3'\), or as"
        r' prompt and .*; set data.messages_column = "messages", or data.prompt_column = "prompt"',
        {"messages_column": "messages"},
        "<user>3<assistant>4<|end|>",
    ),
    "messages-or-alpaca.json": (
        json.dumps([{"instruction": "1", "output": "2", "messages": [user("3")]}] * 30).encode(),
        r"data.path: \S+ can be read in 2 ways: as conversations .*, or as instruction, input and"
        r' output \(Alpaca\) \(the first is \'1\'\); set .* data.answer_column = "output"',
        {"prompt_column": "instruction", "answer_column": "output"},
        "<user>1<assistant>2<|end|>",
    ),
    "two-answers.csv": (
        b"prompt,completion,answer\n" + b"1,2,3\n" * 30,
        r"data.path: \S+ can be read in 2 ways: as prompt and answer .*, or as prompt and"
        r' completion \(TRL\).*; set .*data.answer_column = "answer", or',
        {"answer_column": "completion"},
        "<user>1<assistant>2<|end|>",
    ),
    "ragged.csv": (b"prompt,completion\n1,2\n1,2,3\n", r"data.path: \S+:3 has 3 values", {}, ""),
    "cut.jsonl.gz": (
        gzip.compress(lines_of([{"prompt": "1", "completion": "2"}]))[:-9],
        r"data.path: \S+ cannot be read as gzip: .*; compress the file again",
        {},
        "",
    ),
    "indented.json": (
        json.dumps({"data": [BOTH] * 30}, indent=1).encode(),
        r"data.path: \S+:1 is not JSON: .*; write one array of objects, \[\{",
        {},
        "",
    ),
    "object.json": (
        json.dumps({"data": [{"prompt": "1", "completion": "2"}] * 30}).encode(),
        r"data.path: \S+ is one object, whose key 'data' holds the records; write the array of",
        {},
        "",
    ),
    "cut.json": (
        b'[{"prompt": "1", "completion": "2"}, {"pro',
        r"data.path: \S+ is not a JSON array: .*; write one array of objects, or one JSON object",
        {},
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_ambiguous_or_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    content, message, keys, text = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    path = str(tmp_path / name)
    for job in make_jobs(path):
        with pytest.raises(InvalidInput, match=f"^{message}"):
            check_data(job)
    if keys:
        assert set(read_texts(make_training(path, **keys))) == {text}


def test_data_sets_of_a_job_have_one_layout(tmp_path: Path) -> None:
    for layout in ("Alpaca", "ShareGPT"):
        write(tmp_path / f"{layout}.jsonl", [LAYOUTS[layout](*parts) for parts in PARTS])
    path, eval_path = (str(tmp_path / f"{layout}.jsonl") for layout in ("Alpaca", "ShareGPT"))
    job = make_training(path, eval_path=eval_path)
    with pytest.raises(InvalidInput, match=r"^data.eval_path: .* has conversations \(ShareGPT\)"):
        check_data(job)


def test_a_key_that_does_not_suit_the_layout_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [LAYOUTS["messages"](*parts) for parts in PARTS])
    job = make_training(str(tmp_path / "data.jsonl"), template="Q: {prompt}")
    with pytest.raises(InvalidInput, match=r"^data.template: .*data.messages_column = messages\)"):
        check_data(job)
