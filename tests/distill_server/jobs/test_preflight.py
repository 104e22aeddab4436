"""Jobs that cannot run are refused before they are queued, by file checks and one GetInfo."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.data.tokens.tokenizer import tokens_in, tokens_of
from clients.jobs.job import JobState
from clients.preflight.disk import check_space
from clients.teacher import connection as teacher_connection
from clients.teacher.query import tokenizer_fingerprint
from distill_server.jobs import preflight
from distill_server.jobs.preflight import StudentTokens
from protos.errors import DistillError, InvalidInput, NotFound, Unavailable, WrongState
from tests.distill_server.jobs.preflight_site import (
    TOKENS,
    VOCABULARY,
    Teacher,
    checking_site,
    job,
    serve_teacher,
    write_student,
    write_tokens,
)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_connection, "CONNECT_SECONDS", 0.5)


@pytest.fixture
def teacher() -> Teacher:
    return Teacher()


@pytest.fixture
def address(teacher: Teacher) -> Iterator[str]:
    with serve_teacher(teacher) as server_address:
        yield server_address


@dataclass(frozen=True)
class Refusal:
    """Changes to a valid job ({root}: the test's directory), and the parts of the error message."""

    changes: Mapping[str, Any]
    says: tuple[str, ...]
    category: type[DistillError] = InvalidInput
    student: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "no data": Refusal(
        {"data__path": "{root}/no.jsonl"},
        ("data.path: no such file: ", "that exists on the distill server's machine"),
    ),
    "no held-out data": Refusal(
        {"data__eval_path": "no.parquet"}, ("data.eval_path: no such file: no.parquet",)
    ),
    "no student": Refusal(
        {"student__model": "{root}/nobody"}, ("student.model: no such file: ", "/nobody")
    ),
    "a name too long": Refusal(
        {"student__model": "a" * 5000}, ("student.model: cannot access aaa", "File name too long")
    ),
    "no name": Refusal({"student__model": "a\0b"}, ("student.model: no such file: a\0b",)),
    "no store": Refusal(
        {"method__type": "offline", "data__path": "{root}"},
        ("data.path: {root} is not a store: manifest.json is missing",),
        NotFound,
    ),
    "no weights": Refusal(
        {"student__model": "{root}"}, ("student.model: no config.json in ", "Hugging Face")
    ),
    "idle processes": Refusal(
        {"train__processes": 200, "train__prompts_per_step": 400},
        ("eval.prompts: 128 sequences are too few for 200 processes",),
    ),
    "no key": Refusal({"track__wandb": {}}, ("track.wandb: there is no API key", "WANDB_API_KEY")),
    "no room": Refusal(
        {},
        ("checkpoint.keep: ", "3 checkpoints of 1.2e+07 GB", "an export of 4e+06 GB", "free disk"),
        WrongState,
        {"rows": 10**12},
    ),
    "no teacher": Refusal(
        {"teacher__address": "127.0.0.1:1"},
        ("teacher.address: no teacher answers at 127.0.0.1:1", "distill-teacher"),
        Unavailable,
    ),
    "k > max": Refusal(
        {"teacher__top_k": 14},
        (
            "teacher.top_k: 14 head ids are more than the teacher returns (13)",
            "lower the value to 13",
        ),
    ),
    "too long": Refusal(
        {"method__max_new_tokens": 49},
        (
            "method.max_prompt_tokens: a sequence can have 65 tokens",
            "the teacher reads at most 64; set method.max_prompt_tokens to at most 15, or"
            " method.max_new_tokens to at most 48",
        ),
    ),
    "another tokenizer": Refusal(
        {},
        (
            "student.model: the tokenizers differ: id 1 is '*' to the student and '0' to",
            "use a student with the teacher's tokenizer, or set teacher.tokenizer = 'auto'",
        ),
        WrongState,
        {"tokens": ["<end>", *"*0123456789+="], "width": 14},
    ),
    "another tokenizer of the same size": Refusal(
        {},
        ("student.model: the tokenizers differ: id 12 is '-' to the student and '=' to",),
        WrongState,
        {"tokens": ["<end>", *"0123456789+-"], "unigram": True},
    ),
    "a token without a logit": Refusal(
        {},
        (
            "student.model: the student has logits for 12 ids, the teacher for 13, but id 12 is",
            "the token '=', for which the student has no logit",
            "differ only by padding",
        ),
        WrongState,
        {"width": 12},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_cannot_run_is_refused(
    case: Refusal, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = job(tmp_path, address)
    if case.student:
        config["student"]["model"] = str(write_student(tmp_path / "other", **case.student))
    for name, value in case.changes.items():
        table, key = name.split("__")
        formatted = value.format(root=tmp_path) if isinstance(value, str) else value
        config.setdefault(table, {})[key] = formatted
    if config["method"].get("type") == "offline":
        del config["teacher"]
        del config["method"]["max_prompt_tokens"], config["method"]["max_new_tokens"]
    with checking_site(tmp_path) as server:
        with pytest.raises(case.category) as exc_info:
            server.submit(config)
        assert server.store.page(limit=1) == []
        assert [path.name for path in server.runs.iterdir() if path.is_dir()] == []
    message = str(exc_info.value).replace(str(tmp_path), "{root}")
    assert message.startswith(case.says[0])
    assert all(word in message for word in case.says)


def test_what_can_run_is_queued(address: str, tmp_path: Path) -> None:
    """Jobs with one teacher, several, or none; files from a directory or from the hub."""
    teacher_table = {"teacher": {"top_k": 4}}  # several teachers, and no teacher.address
    several_teachers = {**teacher_table, "teachers": {"math": address, "prose": [address, address]}}
    without_teacher = {**job(tmp_path, address), "method": {"type": "rl", "beta": 0.1}}
    del without_teacher["teacher"]
    with checking_site(tmp_path) as server:
        for config in (
            job(tmp_path, address),
            {**job(tmp_path, address), **several_teachers},
            job(tmp_path, address, student__model="Qwen/Qwen3-0.6B", data__path="openai/gsm8k"),
            {**without_teacher, "reward": {"type": "exact_match"}, "method": {"type": "rl"}},
        ):
            assert server.submit(config) is JobState.QUEUED
        unreachable = {"teachers": {"a": address, "b": "[::1]:1"}}
        with pytest.raises(Unavailable, match="no teacher answers") as exc_info:
            server.submit({**job(tmp_path, address), **teacher_table, **unreachable})
    assert exc_info.value.field == "teachers.b"


def test_widths_that_differ_by_padding(
    teacher: Teacher, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding of the student or the teacher; an old teacher cannot leave out its padding."""
    monkeypatch.setattr(preflight, "_FRESH_SECONDS", 0.0)
    wide_student = write_student(tmp_path / "wide", width=16)
    with checking_site(tmp_path) as server:
        config = job(tmp_path, address)
        assert (
            server.submit(job(tmp_path, address, student__model=str(wide_student)))
            is JobState.QUEUED
        )
        teacher.vocab_size = 16
        assert server.submit(config) is JobState.QUEUED
        teacher.takes_vocab_size = False
        with pytest.raises(
            WrongState, match="cannot exclude the padding ids, 13 and above"
        ) as exc_info:
            server.submit(config)
    assert exc_info.value.field == "student.model"
    assert "update the teacher to the version of this program" in exc_info.value.hint


def test_any_tokenizer_will_do_if_the_job_says_so(address: str, tmp_path: Path) -> None:
    other_student = write_student(tmp_path / "other", tokens=["<end>", *"*0123456789+="], width=14)
    config = job(tmp_path, address, student__model=str(other_student), teacher__tokenizer="auto")
    with checking_site(tmp_path) as server:
        assert server.submit(config) is JobState.QUEUED


def test_many_submits_ask_a_teacher_once(
    teacher: Teacher, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_FRESH_SECONDS", 600.0)
    config = job(tmp_path, address)
    with checking_site(tmp_path) as server:

        async def submit_concurrently() -> None:
            text = json.dumps(config)
            control = server.control
            await asyncio.gather(*(control.submit_checked(text, "", "") for _ in range(100)))

        server.run(submit_concurrently())
        for _ in range(10):
            server.submit(config)
        assert server.store.queue_length() == 110
    assert teacher.info_requests == 1


def test_tokens_that_other_files_name_are_no_difference(
    teacher: Teacher, address: str, tmp_path: Path
) -> None:
    """A library may add tokens after those of the file; a student's files are read once until they
    change.
    """
    with checking_site(tmp_path) as server:
        config = job(tmp_path, address)
        for tokens in (TOKENS[:-1], [*TOKENS[:5], "", *TOKENS[6:]]):
            write_tokens(tmp_path / "student", tokens)
            requests_before = teacher.vocabulary_requests
            for _ in range(3):
                assert server.submit(config) is JobState.QUEUED
            assert teacher.vocabulary_requests == requests_before + 1
        (tmp_path / "student" / "tokenizer.json").write_text("{")
        assert server.submit(config) is JobState.QUEUED
        write_tokens(tmp_path / "student", ["<end>", *"9876543210+="])
        with pytest.raises(WrongState, match="id 1 is '9' to the student"):
            server.submit(config)


def test_a_teacher_that_takes_its_time_holds_up_nobody_else(tmp_path: Path) -> None:
    write_tokens(tmp_path, TOKENS)
    student_tokens = StudentTokens()

    def info(fingerprint: str) -> Any:
        return SimpleNamespace(tokenizer_fingerprint=fingerprint, vocab_size=VOCABULARY)

    def read_slowly() -> list[str]:
        student_info = info(tokenizer_fingerprint(TOKENS))
        other_check = threading.Thread(
            target=student_tokens.check,
            args=(tmp_path, student_info, "other", TOKENS.copy),
            daemon=True,
        )
        other_check.start()
        other_check.join(10)
        assert not other_check.is_alive()
        return TOKENS

    student_tokens.check(tmp_path, info("another"), "teacher", read_slowly)


@pytest.mark.parametrize(
    "document",
    [
        "[]",
        '{"model": {"vocab": {"a": 1000000000000}}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": [[7, 0.0]]}}',
        '{"model": {"vocab": [7]}}',
        "[" * 100_000,
    ],
)
def test_a_tokenizer_file_that_is_none(document: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(document)
    assert tokens_in(tmp_path) is None


def test_the_file_of_a_real_tokenizer(tmp_path: Path) -> None:
    """The same tokens as the library reads."""
    from tests.student_trainer import tiny

    words = tiny.tokenizer()
    words.save_pretrained(tmp_path)
    assert tokens_in(tmp_path) == tokens_of(words)


def test_a_teacher_that_was_started_meanwhile_is_found_at_once(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_FRESH_SECONDS", 600.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = job(tmp_path, f"127.0.0.1:{port}")
    with checking_site(tmp_path) as server:
        with pytest.raises(Unavailable):
            server.submit(config)
        with serve_teacher(teacher, port):
            assert server.submit(config) is JobState.QUEUED


def test_a_check_is_a_submit_that_queues_nothing(address: str, tmp_path: Path) -> None:
    with checking_site(tmp_path) as server:
        check = server.control.check
        server.run(check(json.dumps(job(tmp_path, address))))
        with pytest.raises(InvalidInput, match="14 head ids are more than the teacher returns"):
            server.run(check(json.dumps(job(tmp_path, address, teacher__top_k=14))))
        with pytest.raises(InvalidInput, match="max_steps"):
            server.run(check(json.dumps({**job(tmp_path, address), "max_steps": 0})))
        assert server.store.page(limit=1) == []
        assert [path.name for path in server.runs.iterdir() if path.is_dir()] == []


def test_a_known_key_needs_no_preflight(teacher: Teacher, tmp_path: Path) -> None:
    """A repeated submit returns the same job, even if its teacher is gone."""
    with checking_site(tmp_path) as server:
        with serve_teacher(teacher) as address:
            config = job(tmp_path, address)
            server.submit(config, "key")
        (tmp_path / "prompts.jsonl").unlink()
        server.submit(config, "key")
        assert len(server.store.page(limit=9)) == 1


def test_one_key_at_the_same_time_is_one_job(address: str, tmp_path: Path) -> None:
    text = json.dumps(job(tmp_path, address))
    with checking_site(tmp_path) as server:

        async def submit_concurrently() -> set[str]:
            control = server.control
            submissions = (control.submit_checked(text, "", "key") for _ in range(20))
            return {job.id for job in await asyncio.gather(*submissions)}

        assert len(server.run(submit_concurrently())) == 1
        assert len(server.store.page(limit=9)) == 1


def test_a_token_that_the_teacher_does_not_take(
    teacher: Teacher, address: str, tmp_path: Path
) -> None:
    """The error blames the server's token, not the caller's."""
    teacher.refuses = True
    with (
        checking_site(tmp_path) as server,
        pytest.raises(
            WrongState, match="does not accept the token of the distill server"
        ) as exc_info,
    ):
        server.submit(job(tmp_path, address))
    assert exc_info.value.field == "teacher.address"


def test_what_does_not_answer_in_time_is_left_to_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "_MAX_SECONDS", 0.1)
    with checking_site(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        config = job(tmp_path, f"127.0.0.1:{listener.getsockname()[1]}")
        assert server.submit(config) is JobState.QUEUED
    assert "a job was not checked within" in caplog.text


def test_a_resume_is_looked_at_too(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_FRESH_SECONDS", 0.0)
    with checking_site(tmp_path) as server:
        with serve_teacher(teacher) as address:
            server.submit(job(tmp_path, address))
        (cancelled_job,) = server.store.page(limit=1)
        server.run(server.control.cancel(cancelled_job.id, now=False))
        resume = server.control.resume_checked
        with pytest.raises(Unavailable, match="no teacher answers"):
            server.run(resume(cancelled_job.id, max_steps=0, from_step=0))
        assert server.store.job(cancelled_job.id).state is JobState.CANCELLED
        with serve_teacher(teacher, int(address.rpartition(":")[2])):
            assert (
                server.run(resume(cancelled_job.id, max_steps=0, from_step=0)).state
                is JobState.QUEUED
            )
        with pytest.raises(WrongState, match="only a job that ended can be resumed"):
            server.run(resume(cancelled_job.id, max_steps=0, from_step=0))


def test_disk_of_a_resume(address: str, tmp_path: Path) -> None:
    """Files that earlier attempts wrote need no more space."""
    large_student = write_student(tmp_path / "big", rows=10**8)
    config = OnPolicyJob.model_validate(job(tmp_path, address, student__model=str(large_student)))
    run_directory = tmp_path / "run"
    with pytest.raises(WrongState, match=r"3 checkpoints of 1\.2e\+03 GB .* export of 400 GB"):
        check_space(config, run_directory)
    checkpoint_directory = run_directory / "checkpoints" / "step-000050"
    checkpoint_directory.mkdir(parents=True)
    with (checkpoint_directory / "model.safetensors").open("wb") as sparse_file:
        sparse_file.truncate(4 * 10**12)
    check_space(config, run_directory)
