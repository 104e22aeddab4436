"""The data of a job is opened before the job is queued: format, records and columns."""

from __future__ import annotations

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
CAPTURE = {"method": {"type": "capture"}}


def parquet(**columns: list[Any]) -> bytes:
    """The bytes of a Parquet file with these columns."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class Case:
    """A file in the working directory, what is changed in a job that reads it, and the message."""

    says: str
    content: bytes | str = QUESTIONS
    name: str = "d.jsonl"
    changes: Mapping[str, Any] = field(default_factory=dict)


ONE_OBJECT = "each line must be one JSON object, in UTF-8"
HAS_QUESTION = "the data has the columns question, answer"
REFUSED = {
    "column": Case(
        f"data.prompt_column: d.jsonl has no column 'prompt'; {HAS_QUESTION}; set"
        " data.prompt_column to one of them"
    ),
    "parquet column": Case(
        "data.prompt_column: d.parquet has no column 'prompt'; the data has the column q; set",
        parquet(q=["1+1="]),
        "d.parquet",
    ),
    "empty": Case("data.path: d.jsonl has no records; give a file with at least one", ""),
    "blank": Case("data.path: d.jsonl has no records; give a file with at least one", "\n \n"),
    "empty parquet": Case("data.path: d.parquet has no records", parquet(prompt=[]), "d.parquet"),
    "binary": Case("data.path: d.jsonl is a binary file, not JSON lines; write", b"\0\1\2" * 99),
    "parquet as jsonl": Case("data.path: d.jsonl is a binary file", parquet(prompt=["a"])),
    "jsonl as parquet": Case(
        "data.path: d.parquet is not a Parquet file: it does not start", PROMPTS, "d.parquet"
    ),
    "half a parquet": Case(
        "data.path: d.parquet is not a Parquet file: ",
        parquet(prompt=["a"])[:100],
        "d.parquet",
    ),
    "broken": Case("data.path: d.jsonl:2 is not JSON: ", PROMPTS + '{"prompt": "x\n'),
    "nested": Case("data.path: d.jsonl:1 is not JSON: ", "[" * 100_000),
    "latin-1": Case("data.path: d.jsonl:1 is not JSON: 'utf-8' codec", b'{"prompt": "\xe9"}\n'),
    "array": Case(f"data.path: d.jsonl:1 is not JSON: .*; {ONE_OBJECT}", '[\n{"prompt": "x"}\n]'),
    "no object": Case("data.path: d.jsonl:1 is not a JSON object; each line", '"prompt"\n'),
    "csv": Case(
        "data.path: d.csv is neither a .jsonl nor a .parquet file, .*; convert it: python -c",
        "prompt\nx\n",
        "d.csv",
        {"data": {"path": "d.csv"}},
    ),
    "no csv": Case("data.path: e.csv is neither a .jsonl nor", changes={"data": {"path": "e.csv"}}),
    "zip": Case(
        "data.path: d.jsonl.gz is neither .*; convert it to one of them",
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
    "captured text": Case(
        "data.text_column: d.jsonl has no column 'text'",
        changes=CAPTURE | {"data": {"form": "text"}},
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
    "parquet": Case("", parquet(prompt=["x"], answer=["y"]), "d.parquet"),
    "reward without references": Case(
        "",
        '{"prompt": "x"}',
        changes=RL | {"reward": {"type": "regex", "pattern": "x"}},
    ),
    "hub": Case("", changes={"data": {"path": "openai/gsm8k"}}),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(case: Case) -> AnyJob:
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
    with pytest.raises(InvalidInput, match=f"^{case.says}") as caught:
        check_here(job(case), Path("runs"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
def test_data_that_can_be_read_is_accepted(case: Case) -> None:
    check_here(job(case), Path("runs"))


def test_an_unreadable_file_is_refused(here: Path) -> None:
    config = job(Case("", PROMPTS))
    Path("d.jsonl").chmod(0)
    here.chmod(0o711)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read every file
    try:
        with pytest.raises(InvalidInput, match=r"^data.path: cannot read d.jsonl: Permission den"):
            check_data(config)
    finally:
        os.seteuid(user)


def test_a_pipe_is_refused_without_waiting() -> None:
    config = job(Case("", PROMPTS))
    Path("d.jsonl").unlink()
    os.mkfifo("d.jsonl")
    with pytest.raises(InvalidInput, match=r"^data.path: cannot read d.jsonl: not a regular file"):
        check_data(config)


def test_only_the_start_of_a_large_file_is_read(here: Path) -> None:
    """The file has a hole of 1 TiB, and the check imports no library of models or data."""
    (here / "d.jsonl").write_text(PROMPTS * 200)
    os.truncate(here / "d.jsonl", 1 << 40)
    (here / "job.toml").write_text(
        'student.model = "some/student"\nteacher.address = "x:1"\ndata.path = "d.jsonl"\n'
    )
    code = (
        "import sys\n"
        "from clients import load_job\n"
        "from clients.preflight.data_files import check_data\n"
        "check_data(load_job('job.toml').config)\n"
        "print({'torch', 'datasets', 'transformers', 'pyarrow', 'pandas'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
