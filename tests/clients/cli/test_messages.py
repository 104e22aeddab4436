"""Messages for new users: similar names, missing ports, one line per job."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.on_policy import OnPolicyJob
from clients.preflight import disk
from clients.runs.identity import run_ids
from protos.errors import ExitCode, WrongState
from protos.program.logs import plain

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("address", ["localhost", "[::1]", "host:"])
def test_an_address_without_a_port_is_refused(address: str, capsys: Capture) -> None:
    assert main(["--server", address, "ls"]) == ExitCode.USAGE
    error_text = capsys.readouterr().err
    assert error_text.startswith(
        f"error: --server: '{address}' has no port; give HOST:PORT, such as "
    )
    assert error_text.endswith(":50051\n")


@pytest.mark.parametrize("command", [["config", "schema"], ["config", "show", "job.toml"]])
def test_json_is_accepted_after_the_command(command: list[str], capsys: Capture) -> None:
    Path("job.toml").write_text('student.model = "a/b"\ndata.path = "a/b"\n')
    output = []
    for arguments in (
        ["--json", *command],
        [*command, "--json"],
        [command[0], "--json", *command[1:]],
    ):
        assert main(arguments) == ExitCode.OK
        output.append(capsys.readouterr().out)
    assert len(set(output)) == 1
    assert output[0].startswith("{")


@pytest.mark.parametrize(
    ("directory", "suggestion"),
    [
        ("runs/demo/studnt", "; did you mean runs/demo/student?"),
        ("studnt", "; did you mean student?"),
        ("runs/demo/other", ""),
        ("./other", ""),
    ],
)
def test_a_misspelt_directory_is_told_with_the_near_name(
    directory: str, suggestion: str, capsys: Capture
) -> None:
    Path("runs/demo/student").mkdir(parents=True)
    Path("student").mkdir()
    Path("d.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    assert main(["eval", directory, "--reward", "f1", "--data", "d.jsonl"]) == ExitCode.NOT_FOUND
    assert capsys.readouterr().err == f"error: MODEL: no such directory: {directory}{suggestion}\n"


def test_a_reason_of_several_lines_is_one_line() -> None:
    assert plain("out of\nmemory\r\n\nthen \x1b[2J") == "out of memory then \\x1b[2J"


def test_names_in_any_script_make_readable_ids() -> None:
    ids = [
        next(run_ids("on_policy", name))
        for name in ("\u6570\u5b66", "\u6570\u5b66", "\u8bfb\u5199", "\u6570\u5b66 v2")
    ]
    slugs = [run_id.rsplit("-", 1)[0] for run_id in ids]
    assert all(run_id.isascii() for run_id in ids)
    assert slugs[0] == slugs[1] != slugs[2]
    assert slugs[3] == "on-policy-v2"
    assert len(set(itertools.islice(run_ids("rl", "\ud800"), 3))) == 3


@pytest.mark.parametrize(
    ("keep", "remedy"), [(2, "free disk space: "), (3, "lower the value, or free")]
)
def test_a_minimum_is_not_lowered(
    keep: int, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "parameters_of", lambda model: 10**15)
    values = {"student": {"model": "m"}, "data": {"path": "d"}, "checkpoint": {"keep": keep}}
    with pytest.raises(WrongState) as caught:
        disk.check_space(OnPolicyJob.model_validate(values), tmp_path)
    assert caught.value.hint.startswith(remedy)


@pytest.mark.parametrize(
    "program",
    [
        "from clients.cli.app import main; main(['doctor'])",
        pytest.param(
            "from clients.cli.app import main\n"
            "main(['-q', 'eval', './m', '--reward', 'f1', '--data', 'd.jsonl'])",
            marks=pytest.mark.slow,
        ),
        "from pathlib import Path\n"
        "from clients.cli.demos.services import Services\n"
        "with Services(Path()) as services:\n"
        "    services.run('tool', ['student_trainer.tools.addition', '--help'])",
    ],
    ids=["doctor", "eval", "demo"],
)
def test_code_of_the_working_directory_is_not_run(program: str, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("open('executed', 'w')\nraise SystemExit('executed')\n")
    (tmp_path / "torch.py").write_text("open('executed', 'w')\n__version__ = '0'\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    (tmp_path / "m").mkdir()
    command = [sys.executable, "-P", "-c", program]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not (tmp_path / "executed").exists(), process.stderr
    assert "Traceback" not in process.stderr
