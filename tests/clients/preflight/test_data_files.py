"""The data of a job is checked before the job is queued: format, records and columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from clients.config.kinds import AnyJob, kind_of
from clients.preflight.data_files import check_data
from clients.preflight.files import check_here
from protos.errors import InvalidInput

QUESTIONS = '{"question": "1+1=", "answer": "2"}\n'
PROMPTS = '{"prompt": "1+1=", "answer": "2"}\n'
RL = {"method": {"type": "rl"}, "teacher": None}
OFFLINE = {"method": {"type": "offline"}, "data": {"path": "store"}, "teacher": None}
SFT = {"method": {"type": "sft"}, "teacher": None}
TALK = {"data": {"messages_column": "m"}}
CAPTURE = {"method": {"type": "capture"}}


def parquet_bytes(**columns: list[Any]) -> bytes:
    """Return the bytes of a Parquet file with these columns."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue())


def row_groups_bytes(*row_groups: list[str]) -> bytes:
    """Return the bytes of a Parquet file of prompts with a row group for each list."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.parquet.ParquetWriter(sink, pyarrow.schema({"prompt": "string"})) as file:
        for prompts in row_groups:
            file.write_table(pyarrow.table({"prompt": pyarrow.array(prompts, "string")}))
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class Case:
    """A file in the working directory, the changes of a job that reads it, and the message."""

    message: str
    content: bytes | str = QUESTIONS
    name: str = "d.jsonl"
    changes: Mapping[str, Any] = field(default_factory=dict)


ONE_OBJECT = "each line must be one JSON object, in UTF-8"
HAS_QUESTION = "the data has the columns question, answer"
REFUSED = {
    "column": Case(
        f"data.prompt_column: d.jsonl has no column 'prompt'; {HAS_QUESTION}; set"
        f" data.prompt_column to one of these columns"
    ),
    "parquet column": Case(
        "data.prompt_column: d.parquet has no column 'prompt'; the data has the column q; set",
        parquet_bytes(q=["1+1="]),
        "d.parquet",
    ),
    "empty": Case("data.path: d.jsonl has no records; give a file with at least one", ""),
    "blank": Case("data.path: d.jsonl has no records; give a file with at least one", "\n \n"),
    "empty parquet": Case(
        "data.path: d.parquet has no records", parquet_bytes(prompt=[]), "d.parquet"
    ),
    "binary": Case("data.path: d.jsonl is a binary file, not JSON lines; write", b"\0\1\2" * 99),
    "parquet as jsonl": Case("data.path: d.jsonl is a binary file", parquet_bytes(prompt=["a"])),
    "jsonl as parquet": Case(
        "data.path: d.parquet is not a Parquet file: the file does not start", PROMPTS, "d.parquet"
    ),
    "half a parquet": Case(
        "data.path: d.parquet is not a Parquet file: ",
        parquet_bytes(prompt=["a"])[:100],
        "d.parquet",
    ),
    "broken": Case("data.path: d.jsonl:2 is not JSON: ", PROMPTS + '{"prompt": "x\n'),
    "nested": Case("data.path: d.jsonl:1 is not JSON: ", "[" * 100_000),
    "latin-1": Case("data.path: d.jsonl:1 is not JSON: 'utf-8' codec", b'{"prompt": "\xe9"}\n'),
    "array": Case(f"data.path: d.jsonl:1 is not JSON: .*; {ONE_OBJECT}", '[\n{"prompt": "x"}\n]'),
    "array of arrays": Case(
        "data.path: record 1 of d.json is not a JSON object; each element must be",
        "[[1]]",
        "d.json",
    ),
    "object with the records": Case(
        "data.prompt_column: d.json has no column 'prompt'; the data has the columns version, rows;"
        " if 'rows' holds the records, write the array of this key alone, such as with jq .rows",
        json.dumps({"version": 1, "rows": [{"prompt": "x"}]}),
        "d.json",
    ),
    "no object": Case("data.path: d.jsonl:1 is not a JSON object; each line", '"prompt"\n'),
    "csv": Case(
        "data.path: d.csv:3 has 2 values, but the first line names 1 columns; write a value with",
        "prompt\nx\ny,z\n",
        "d.csv",
        {"data": {"path": "d.csv"}},
    ),
    "tsv": Case(
        "data.path: d.tsv is in no supported format: .jsonl, .json, .csv .*; convert the file to",
        "prompt\nx\n",
        "d.tsv",
        {"data": {"path": "d.tsv"}},
    ),
    "no tsv": Case("data.path: e.tsv is in no supported", changes={"data": {"path": "e.tsv"}}),
    "no file": Case(
        "data.path: no file matches e-[*].jsonl; relative paths start at",
        changes={"data": {"path": "e-*.jsonl"}},
    ),
    "zip": Case(
        "data.path: d.jsonl.gz cannot be read as gzip: .*; compress the file again",
        b"\x1f\x8b",
        "d.jsonl.gz",
        {"data": {"path": "d.jsonl.gz"}},
    ),
    "answer for a metric": Case(
        "data.answer_column: d.jsonl has no column 'answer'; the data has the column prompt",
        '{"prompt": "x"}\n',
        changes={"eval": {"metric": "exact_match"}},
    ),
    "answer for a reward": Case(
        "data.answer_column: d.jsonl has no column 'a'; the data has the columns prompt, answer",
        PROMPTS,
        changes=RL | {"data": {"answer_column": "a"}, "reward": {"type": "f1"}},
    ),
    "answer for a pattern": Case(
        "data.answer_column: d.jsonl has no column 'a'",
        PROMPTS,
        changes=RL
        | {"data": {"answer_column": "a"}, "reward": {"type": "regex", "pattern": "(x)"}},
    ),
    "teacher": Case(
        "data.teacher_column: d.jsonl has no column 'teacher'; the data has",
        PROMPTS,
        changes={"teachers": {"a": "x:1", "b": "y:1"}, "teacher": None},
    ),
    "context": Case(
        "teacher.context: d.jsonl has no column 'solution'; the data has the columns prompt,"
        " answer; set the key to one of these columns",
        PROMPTS,
        changes={"teacher": {"address": "x:1", "context": "{answer}, by {solution}"}},
    ),
    "context of an anchor": Case(
        "anchor.context: d.jsonl has no column 'proof'",
        PROMPTS,
        changes=RL | {"method": {"type": "rl", "beta": 0.1}, "anchor": {"context": "{proof}"}},
    ),
    "captured context": Case(
        "teacher.context: d.jsonl has no column 'proof'",
        PROMPTS,
        changes=CAPTURE | {"teacher": {"address": "x:1", "context": "{proof}"}},
    ),
    "held-out data": Case(
        "data.prompt_column: d.jsonl has no column 'prompt'",
        changes={"data": {"path": "some/data", "eval_path": "d.jsonl"}},
    ),
    "offline prompts": Case(
        "data.prompt_column: d.jsonl has no column 'prompt'",
        changes=OFFLINE
        | {"data": {"path": "store", "eval_prompts": "d.jsonl"}}
        | {"eval": {"metric": "exact_match"}},
    ),
    "captured answers": Case(
        "data.answer_column: d.jsonl has no column 'answer'", '{"prompt": "x"}', changes=CAPTURE
    ),
    "captured messages": Case(
        "data.messages_column: d.jsonl has no column 'messages'",
        changes=CAPTURE | {"data": {"form": "messages"}},
    ),
    "captured roles": Case(
        "data.messages_column: message 1 of row 1 of d.jsonl has the role 'human'",
        '{"messages": [{"role": "human", "content": "1"}]}\n',
        changes=CAPTURE | {"data": {"form": "messages"}},
    ),
    "nothing to score": Case(
        "data.messages_column: the conversations of d.jsonl have no message of the assistant",
        '{"messages": [{"role": "user", "content": "1"}]}\n',
        changes=CAPTURE | {"data": {"form": "messages"}},
    ),
    "captured text": Case(
        "data.text_column: d.jsonl has no column 'text'",
        changes=CAPTURE | {"data": {"form": "text"}},
    ),
    "no conversation": Case(
        "data.messages_column: row 1 of d.jsonl has no list of messages in column 'question'",
        changes={"data": {"messages_column": "question"}},
    ),
    "conversation column": Case(
        "data.messages_column: d.jsonl has no column 'messages'",
        changes={"data": {"messages_column": "messages"}},
    ),
    "role": Case(
        "data.messages_column: message 1 of row 1 of d.jsonl has the role 'asistant'; use one of",
        '{"m": [{"role": "asistant", "content": "1"}]}\n',
        changes=TALK,
    ),
    "role in parquet": Case(
        "data.messages_column: message 1 of row 1 of d.parquet has the role 'asistant'",
        parquet_bytes(m=[[{"role": "asistant", "content": "1"}]]),
        "d.parquet",
        TALK,
    ),
    "system twice": Case(
        "data.system: row 1 of d.jsonl has its own system message",
        '{"m": [{"role": "system", "content": "1"}]}\n',
        changes={"data": {"messages_column": "m", "system": "2"}},
    ),
    "no reference": Case(
        "data.answer_column: the conversations of d.jsonl do not end with the assistant's",
        '{"m": [{"role": "user", "content": "1"}]}\n',
        changes=TALK | {"eval": {"metric": "exact_match"}},
    ),
    "nothing to learn": Case(
        "data.messages_column: the conversations of d.jsonl have no message of the assistant",
        '{"m": [{"role": "user", "content": "1"}], "answer": "2"}\n',
        changes=TALK | SFT,
    ),
    "answer to learn": Case(
        "data.answer_column: d.jsonl has no column 'answer'", '{"prompt": "x"}\n', changes=SFT
    ),
    "weight column": Case(
        "data.weight_column: d.jsonl has no column 'w'",
        PROMPTS,
        changes={"data": {"weight_column": "w"}},
    ),
    "weight": Case(
        "data.weight_column: row 2 of d.jsonl has -1 in column 'w', which must hold a number",
        '{"prompt": "x", "w": 1}\n{"prompt": "x", "w": -1}\n',
        changes={"data": {"weight_column": "w"}},
    ),
    "not a number": Case(
        "data.weight_column: row 1 of d.jsonl has nan in column 'w'",
        '{"prompt": "x", "w": NaN}\n',
        changes={"data": {"weight_column": "w"}},
    ),
    "mixture": Case(
        "data.prompt_column: d.jsonl has no column 'prompt'",
        changes={"data": {"path": "some/data", "mix": [{"path": "d.jsonl", "share": 0.5}]}},
    ),
    "two parts": Case(
        "student.model: no such file: models/studnet",
        PROMPTS,
        changes={"student": {"model": "models/studnet"}},
    ),
    "no hub id": Case(
        "student.model: no such file: my model; relative paths start at",
        PROMPTS,
        changes={"student": {"model": "my model"}},
    ),
    "other suffix": Case(
        "data.path: no such file: d.jsn; did you mean d.jsonl",
        PROMPTS,
        changes={"data": {"path": "d.jsn"}},
    ),
    "mixed file": Case(
        "data.mix.0.path: no such file: e.jsonl",
        PROMPTS,
        changes={"data": {"mix": [{"path": "e.jsonl", "share": 0.5}]}},
    ),
    "mixed format": Case(
        "data.mix.1.path: e.tsv is in no supported format",
        PROMPTS,
        changes={"data": {"mix": [{"path": p, "share": 0.5 / 2} for p in ("d.jsonl", "e.tsv")]}},
    ),
    "passages": Case(
        "environment.retriever: d.jsonl has no column 'contents'; .*; rename a column to",
        changes=RL
        | {"data": {"path": "some/data"}, "reward": {"type": "f1"}}
        | {"environment": {"retriever": "d.jsonl"}, "method": {"type": "rl"}},
    ),
}
ACCEPTED = {
    "questions": Case("", changes={"data": {"prompt_column": "question"}}),
    "later column": Case("", '{"text": "no prompt"}\n\n' + PROMPTS),
    "broken later": Case("", PROMPTS * 20 + "{"),
    "byte order mark": Case("", b"\xef\xbb\xbf" + PROMPTS.encode()),
    "no answer": Case("", '{"prompt": "x"}'),
    "long line": Case("", '{"x": "' + "y" * (2 << 20) + '", "prompt": ""}'),
    "parquet": Case("", parquet_bytes(prompt=["x"], answer=["y"]), "d.parquet"),
    "parquet that starts with nothing": Case("", row_groups_bytes([], ["x"]), "d.parquet"),
    "reward without references": Case(
        "",
        '{"prompt": "x"}',
        changes=RL | {"reward": {"type": "regex", "pattern": "x"}},
    ),
    "conversation": Case("", '{"m": [{"role": "user", "content": "1"}]}\n', changes=TALK),
    "conversation later": Case(
        "", '{"x": 1}\n{"m": [{"role": "user", "content": "1"}]}\n', changes=TALK
    ),
    "reference in a column": Case(
        "",
        '{"m": [{"role": "user", "content": "1"}], "answer": "2"}\n',
        changes=TALK | {"eval": {"metric": "exact_match"}},
    ),
    "learned conversation": Case(
        "",
        '{"m": [{"role": "assistant", "content": "1"}, {"role": "user", "content": "1"}]}\n',
        changes=TALK | SFT,
    ),
    "held out without weights": Case(
        "",
        PROMPTS,
        changes={"data": {"path": "some/data", "eval_path": "d.jsonl", "weight_column": "w"}},
    ),
    "hub": Case("", changes={"data": {"path": "openai/gsm8k"}}),
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    return tmp_path


def make_job(case: Case) -> AnyJob:
    Path(case.name).write_bytes(
        case.content if isinstance(case.content, bytes) else case.content.encode()
    )
    values: dict[str, Any] = {
        "student": {"model": "some/student"},
        "teacher": {"address": "localhost:1"},
        "data": {"path": case.name},
    }
    for table, keys in case.changes.items():
        if keys is None:
            del values[table]
        else:
            values[table] = {**values.get(table, {}), **keys}
    return kind_of(values).model_validate(values)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_data_that_cannot_be_read_is_refused(case: Case) -> None:
    with pytest.raises(InvalidInput, match=f"^{case.message}") as caught:
        check_here(make_job(case), Path("runs"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
def test_data_that_can_be_read_is_accepted(case: Case) -> None:
    check_here(make_job(case), Path("runs"))


def test_no_hub_is_asked_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)
    with pytest.raises(InvalidInput, match=r"^data.path: d.xlsx is in no supported format"):
        check_here(make_job(Case("", b"PK", "d.xlsx")), Path("runs"))


def test_an_unreadable_file_is_refused(working_directory: Path) -> None:
    config = make_job(Case("", PROMPTS))
    Path("d.jsonl").chmod(0)
    working_directory.chmod(0o711)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read every file
    try:
        with pytest.raises(InvalidInput, match=r"^data.path: cannot read d.jsonl: Permission den"):
            check_data(config)
    finally:
        os.seteuid(user)


def test_a_pipe_is_refused_without_waiting() -> None:
    config = make_job(Case("", PROMPTS))
    Path("d.jsonl").unlink()
    os.mkfifo("d.jsonl")
    with pytest.raises(InvalidInput, match=r"^data.path: cannot read d.jsonl: not a regular file"):
        check_data(config)


def test_only_the_start_of_a_large_file_is_read(working_directory: Path) -> None:
    """The file has a hole of 1 TiB, and the check imports no library of models or data."""
    (working_directory / "d.jsonl").write_text(PROMPTS * 200)
    os.truncate(working_directory / "d.jsonl", 1 << 40)
    (working_directory / "job.toml").write_text(
        'student.model = "some/student"\nteacher.address = "x:1"\ndata.path = "d.jsonl"\n'
    )
    code = (
        "import sys\n"
        "from clients import load_job\n"
        "from clients.preflight.data_files import check_data\n"
        "check_data(load_job('job.toml').config)\n"
        "print({'torch', 'datasets', 'transformers', 'pyarrow', 'pandas'} & set(sys.modules))\n"
    )
    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert process.stdout == "set()\n", process.stderr


def write_student(template: str | None) -> Path:
    """Write a student of which only the chat template can be read."""
    path = Path("student")
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    (path / "tokenizer.json").touch()
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (None, {"system": "Be brief."}, "data.system: the tokenizer has no chat template"),
        (None, {"template_arguments": {"a": 1}}, "data.template_arguments: the tokenizer has no"),
        ("{{ enable_thinking }}", {"template_arguments": {"enable_thinkin": False}},
         "data.template_arguments: the chat template of the tokenizer has no argument"
         " 'enable_thinkin'; did you mean 'enable_thinking'"),
    ],
)  # fmt: skip
def test_a_chat_template_that_does_not_fit_is_refused(
    template: str | None, changes: dict[str, Any], message: str
) -> None:
    student = {"student": {"model": str(write_student(template))}}
    with pytest.raises(InvalidInput, match=f"^{message}"):
        check_here(make_job(Case("", PROMPTS, changes=student | {"data": changes})), Path("runs"))


def test_a_chat_template_must_mark_what_is_learned() -> None:
    line = '{"m": [{"role": "assistant", "content": "1"}]}\n'
    student = {"student": {"model": str(write_student("{{ messages }}"))}}
    method = {"method": {"type": "sft", "train_on": "all"}, "teacher": None}
    with pytest.raises(InvalidInput, match=r"^method.train_on: the tokenizer's chat template has"):
        check_here(make_job(Case("", line, changes=TALK | student | method)), Path("runs"))
