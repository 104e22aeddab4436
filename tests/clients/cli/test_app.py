"""The command as a whole: error handling, exit codes, text and JSON output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.cli.app import EXIT_CODE_MEANINGS, main
from clients.config.kinds import KINDS
from protos.errors import ExitCode
from protos.rpc.ports import free_ports

Capture = pytest.CaptureFixture[str]


def test_help_lists_every_exit_code(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert set(EXIT_CODE_MEANINGS) == set(ExitCode)
    for code, meaning in EXIT_CODE_MEANINGS.items():
        assert f"  {code.value:<4} {meaning}\n" in output


def test_no_command_is_help_and_usage(capsys: Capture) -> None:
    assert main([]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("Usage: distill")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lss"], "error: No such command 'lss'. Did you mean 'ls'; see distill --help\n"),
        (["show"], "error: Missing argument 'JOB'; see distill show --help\n"),
        (["ls", "--server", "x"], "error: --server: 'x' has no port; give HOST:PORT, such as x:"),
        (["ls", "--", "--server"], "error: Got unexpected extra argument"),
        (["ls", "--limit", "0"], "error: Invalid value for '--limit': "),
        (["ls", "--state", "x"], "error: Invalid value for '--state': 'x' is not one of 'queued'"),
        (["run"], "error: give either a job file or --resume DIR; see distill run --help\n"),
        (["resume", "x", "--set", "seed=3"], "error: --set seed: a resumed job can only change"),
        (["resume", "x", "--set", "max_steps=0"], "error: max_steps: must be a whole number"),
    ],
)
def test_wrong_usage_is_one_sentence(capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_job_file_that_is_missing(capsys: Capture) -> None:
    assert main(["config", "check", "none.toml"]) == ExitCode.NOT_FOUND
    assert capsys.readouterr().err == "error: none.toml: no such file\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "{0}", "ls"],
        ["ls", "--server", "{0}"],
        ["ls", "--server={0}", "--no-color", "-q"],
        ["ls", "-v", "--limit", "3", "--server", "{0}"],
    ],
)
def test_global_options_may_follow_the_command(
    capsys: Capture, unused_address: str, arguments: list[str]
) -> None:
    """The dashboard's commands have the server last."""
    words = [word.format(unused_address) for word in arguments]
    assert main(words) == ExitCode.UNREACHABLE
    assert f"cannot reach the distill server {unused_address}" in capsys.readouterr().err


def test_errors_as_json(capsys: Capture) -> None:
    assert main(["--json", "resume", "x", "--set", "seed=3"]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err) == {
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "a resumed job can only change max_steps",
            "field": "--set seed",
            "hint": "submit a new job to change other keys",
        }
    }


@pytest.fixture
def unused_address() -> str:
    """An address at which no server listens."""
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize("command", [["ls"], ["show", "x"], ["cancel", "x"], ["logs", "x"]])
def test_no_server_is_one_sentence_and_4(
    capsys: Capture, unused_address: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTILL_SERVER", unused_address)
    assert main(command) == ExitCode.UNREACHABLE
    error_text = capsys.readouterr().err
    assert error_text.startswith(f"error: cannot reach the distill server {unused_address}")
    assert error_text.count("\n") == 1


def test_a_disk_that_refuses_is_one_sentence(
    capsys: Capture, job_file: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("in the way")
    assert main(["run", job_file()]) == ExitCode.JOB_FAILED
    assert capsys.readouterr().err.startswith("error: runs")


def test_config_commands(capsys: Capture, job_file: Callable[..., str]) -> None:
    name = job_file()
    assert main(["config", "check", name]) == 0
    assert capsys.readouterr().out == "job.toml: ok\n"
    assert main(["config", "show", name, "--set", "seed=4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["KEY", "VALUE", "SOURCE"] in lines
    assert ["student.model", '"org/model"', "job.toml:1"] in lines
    assert ["seed", "4", "--set"] in lines
    assert ["student.revision", "-", "default"] in lines
    assert main(["--json", "config", "show", name]) == 0
    rows = json.loads(capsys.readouterr().out)["values"]
    assert {"key": "seed", "value": 0, "source": "default"} in rows
    assert main(["config", "schema"]) == 0
    kinds = json.loads(capsys.readouterr().out)["$defs"]
    assert kinds["OnPolicyJob"]["properties"]["max_steps"]["description"] == "Optimizer steps."
    assert "max_steps" not in kinds["CaptureJob"]["properties"]
    for method, kind in KINDS.items():
        assert main(["config", "schema", "--method", method]) == 0
        kinds = json.loads(capsys.readouterr().out)["$defs"]
        assert {name for name in kinds if name.endswith("Job")} == {kind.__name__}


def test_dry_run_needs_no_server(
    capsys: Capture, job_file: Callable[..., str], unused_address: str
) -> None:
    assert main(["--server", unused_address, "submit", job_file(), "--dry-run", "--name", "7"]) == 0
    captured = capsys.readouterr()
    assert '"7"' in captured.out
    assert captured.err.startswith(
        f"checked the job file only: cannot reach the distill server {unused_address}"
    )


def test_doctor(capsys: Capture, unused_address: str) -> None:
    code = main(["--json", "--server", unused_address, "doctor"])
    report = json.loads(capsys.readouterr().out)
    assert code == ExitCode.JOB_FAILED
    assert report["problems"] == [f"server: {unused_address} does not answer (UNAVAILABLE)"]
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["protos"].endswith("protos/__init__.py")
    assert values["clients"].endswith("clients/__init__.py")
    main(["--server", unused_address, "doctor", "--teacher", unused_address])
    last_lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[1] for line in last_lines] == ["server:", "teacher:"]


@pytest.mark.parametrize("command", [["config", "schema"], ["--help"]])
def test_a_reader_who_has_enough_hears_no_more(command: list[str]) -> None:
    command = [sys.executable, "-m", "clients", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == ExitCode.JOB_FAILED


def test_doctor_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clients.cli.commands.doctor._check_torch", raise_interrupt)
    assert main(["doctor"]) == ExitCode.INTERRUPTED
