"""Owners, labels, quotas and the audit log of a real server, through the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from distill_server.people.audit import Audit
from distill_server.rpc.service import DistillService
from protos.auth.access import REQUIRED_ROLES, Caller, Role
from protos.errors import (
    ExitCode,
    Forbidden,
    InvalidInput,
    NotFound,
    Unauthenticated,
    WrongState,
)
from tests.distill_server.conftest import Server, eventually, job_config

ANN, BOB, BOT, READ = ("a" * 43, "b" * 43, "c" * 43, "d" * 43)
TOKENS = (
    f"submit {ANN} owner=ann jobs=1\nadmin {BOB} owner=bob@lab\nsubmit {BOT}\nread {READ} owner=ann"
)
Capture = pytest.CaptureFixture[str]
MakeServer = Callable[..., Server]


@pytest.fixture
def use_token(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda token: monkeypatch.setenv("DISTILL_TOKEN", token)


def lines_of(server: Server) -> list[dict[str, object]]:
    text = (server.runs / "audit.jsonl").read_text()
    assert not any(token in text for token in (ANN, BOB, BOT, READ))
    return [json.loads(line) for line in text.splitlines()]


def test_owners_labels_and_the_audit_log(
    make_server: MakeServer, use_token: Callable[[str], None], capsys: Capture
) -> None:
    server = make_server(slots=3, tokens=TOKENS)

    def distill(*arguments: str) -> str:
        capsys.readouterr()
        code = main(["--server", server.address, "--json", *arguments])
        output = capsys.readouterr()
        return output.out if code == 0 else f"{code} {output.err}"

    use_token(ANN)
    with DistillClient(server.address) as client:
        long_config = job_config("long", max_steps=10_000).model_copy(
            update={"labels": {"for": "paper"}}
        )
        first_job = client.submit(long_config)
        second_job = client.submit(job_config("second", max_steps=2))
        assert (first_job.owner, first_job.labels) == ("ann", {"for": "paper"})
        waiting_phase = "WAITING quota: ann may run 1 job at once"
        eventually(lambda: second_job.refresh().phase == waiting_phase)
    use_token(BOB)
    with DistillClient(server.address) as client:
        third_job = client.submit(job_config("third", max_steps=2))
        assert third_job.wait(60).state is JobState.SUCCEEDED, "it passed the job of ann"
        with pytest.raises(WrongState):
            client.cancel(third_job.id)

    def list_names(*arguments: str) -> list[str]:
        return [job["name"] for job in json.loads(distill("ls", *arguments))["jobs"]]

    assert list_names("--mine") == ["third"]
    assert list_names("--owner", "ann") == ["second", "long"]
    assert list_names("--label", "for=paper") == ["long"]
    assert list_names("--label", "for=thesis") == []
    assert "is not NAME=VALUE" in distill("ls", "--label", "paper")
    use_token(READ)
    assert list_names("--mine") == ["second", "long"], "every token of an owner"
    assert distill("cancel", "--mine").startswith(f"{ExitCode.REFUSED.value} ")
    use_token(BOT)
    with DistillClient(server.address) as client, pytest.raises(InvalidInput, match="owner=NAME"):
        client.list(mine=True)
    use_token(ANN)
    cancelled = json.loads(distill("cancel", "--mine", "--now"))["jobs"]
    assert {job["id"] for job in cancelled} == {first_job.id, second_job.id}

    audit_lines = [
        (line["by"], line["action"], line["about"], line["outcome"]) for line in lines_of(server)
    ]
    assert audit_lines == [
        ("ann", "SubmitJob", [first_job.id], "OK"),
        ("ann", "SubmitJob", [second_job.id], "OK"),
        ("bob@lab", "SubmitJob", [third_job.id], "OK"),
        ("bob@lab", "CancelJob", [third_job.id], "FAILED_PRECONDITION"),
        ("ann", "CancelJob", [], "PERMISSION_DENIED"),
        ("ann", "CancelJob", [second_job.id], "OK"),  # it is queued
        ("ann", "CancelJob", [first_job.id], "OK"),
    ]
    assert {line["role"] for line in lines_of(server)} == {"submit", "admin", "read"}
    assert (server.runs / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_removal_leaves_its_line_and_the_file_may_be_moved(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(job_config(max_steps=1))
        assert job.wait(60).state is JobState.SUCCEEDED
        (server.runs / "audit.jsonl").rename(tmp_path / "old.jsonl")
        client.pin(job.id)
        client.pin(job.id, pinned=False)
        client.remove(job.id)
        client.check(job_config())
    actions = [(line["action"], line["about"]) for line in lines_of(server)]
    assert actions == [("PinJob", [job.id])] * 2 + [("RemoveJob", [job.id])]
    assert lines_of(server)[0]["by"] == "", "a server without tokens knows nobody"


def test_refused_calls_and_downloads(
    make_server: MakeServer, use_token: Callable[[str], None], tmp_path: Path
) -> None:
    server = make_server(tokens=TOKENS)
    use_token(BOB)
    with DistillClient(server.address) as client:
        job = client.submit(job_config(max_steps=2))
        assert job.wait(60).state is JobState.SUCCEEDED
        client.pull("@last", tmp_path / "out")
        with pytest.raises(NotFound):
            client.pull(job.id, tmp_path / "step", checkpoint=77)
        with pytest.raises(WrongState):
            client.cancel("@last")
        with pytest.raises(NotFound):
            client.cancel("nothing")
    unknown = "x" * 43
    use_token(unknown)
    with DistillClient(server.address) as client, pytest.raises(Unauthenticated):
        client.list()
    use_token("")
    with DistillClient(server.address) as client, pytest.raises(Unauthenticated):
        client.remove(job.id)
    lines = lines_of(server)
    assert [(line["action"], line["about"], line["outcome"]) for line in lines[1:]] == [
        ("GetArtifact", [job.id], "OK"),
        ("GetArtifact", [job.id], "NOT_FOUND"),
        ("CancelJob", [job.id], "FAILED_PRECONDITION"),
        ("CancelJob", ["nothing"], "NOT_FOUND"),
        ("ListJobs", [], "UNAUTHENTICATED"),
        ("RemoveJob", [], "UNAUTHENTICATED"),
    ]
    assert [line["by"] for line in lines] == ["bob@lab"] * 5 + ["", ""]
    assert lines[5]["token"] == sha256(unknown.encode()).hexdigest()[:8]
    assert (lines[6]["token"], lines[6]["role"]) == ("", "")
    assert unknown not in (server.runs / "audit.jsonl").read_text()


def test_refused_calls_have_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    seconds = [1000.0]
    monkeypatch.setattr("distill_server.people.audit.time.monotonic", lambda: seconds[0])
    for _ in range(2):
        for _ in range(1000):
            audit.record_refusal("ListJobs", (), "peer", Unauthenticated("no token"))
        seconds[0] += 61
    audit.record_refusal("ListJobs", (), "peer", Forbidden("no role"))
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert len(lines) == 121
    unlisted = [line["unlisted_refusals"] for line in lines if "unlisted_refusals" in line]
    assert unlisted == [940, 940]
    assert audit.refusals == {"UNAUTHENTICATED": 2000, "PERMISSION_DENIED": 1}


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_a_caller_that_gives_up(error: type[BaseException], tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    with pytest.raises(error), audit.entry("GetArtifact", Caller(), "peer", "job"):
        raise error
    assert json.loads((tmp_path / "audit.jsonl").read_text())["outcome"] == "CANCELLED"


def test_a_full_disk_stops_no_request(make_server: MakeServer) -> None:
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(job_config(max_steps=10_000))
        (server.runs / "audit.jsonl").unlink()
        (server.runs / "audit.jsonl").mkdir()
        assert client.cancel(job.id, now=True).wait(60).state is JobState.CANCELLED


def test_every_method_that_changes_something_is_audited() -> None:
    service = "/distill.v1.Distill/"
    changing = {
        name.removeprefix(service)
        for name, role in REQUIRED_ROLES.items()
        if name.startswith(service) and role is not Role.READ
    }
    for name in changing - {"CheckJob"}:
        assert hasattr(getattr(DistillService, name), "__wrapped__"), name


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("owner=-x", "has a wrong owner"),
        ("owner=a b=1", "is not ROLE TOKEN"),
        ("owner=a owner=b", "is not ROLE TOKEN"),
        ("jobs=2", "has a quota, but no owner"),
        ("owner=a jobs=two", "has a wrong jobs"),
        ("owner=ann jobs=2", "the tokens of owner ann have different quotas"),
    ],
)
def test_wrong_terms_of_a_token(word: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from protos.auth.access import read_tokens

    monkeypatch.setenv("DISTILL_TOKENS", f"{TOKENS}\nread {'e' * 43} {word}")
    with pytest.raises(InvalidInput, match=message) as exc_info:
        read_tokens(None)
    assert "eee" not in str(exc_info.value)


def test_distill_token_writes_the_terms(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from protos.auth.access import read_tokens
    from protos.auth.owners import Quota

    assert main(["token", "--role", "submit", "--owner", "ann", "--jobs", "2", "--gpus", "4"]) == 0
    line = capsys.readouterr().out
    monkeypatch.setenv("DISTILL_TOKENS", line)
    tokens = read_tokens(None)
    assert tokens.quotas == {"ann": Quota(2, 4)}
    caller = tokens.caller_in([("authorization", f"Bearer {line.split()[1]}")])
    assert (caller.role, caller.owner, len(caller.token)) == (Role.SUBMIT, "ann", 8)
    assert main(["token", "--jobs", "2"]) == ExitCode.USAGE
