"""The parts of the demo that run no model: its processes, its directory and the shipped files."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.cli.demos.demo import MODELS, _accuracy_and_kl
from clients.cli.demos.services import Services
from protos.errors import ExitCode, InternalFault

SERVER = """
import os, sys, time, pathlib
print("some warning", file=sys.stderr)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
print(f"server listening on 127.0.0.1:{os.environ['OMP_NUM_THREADS']}")
time.sleep(60)
"""


@pytest.fixture
def modules_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose modules `python -m` can run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_server_is_found_and_stopped(modules_directory: Path) -> None:
    (modules_directory / "stand_in.py").write_text(SERVER)
    with Services(modules_directory / "logs") as services:
        assert (
            services.listen("server", ["stand_in", str(modules_directory / "pid")]) == "127.0.0.1:1"
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((modules_directory / "pid").read_text()), 0)


def test_sigterm_stops_everything_too(modules_directory: Path) -> None:
    (modules_directory / "stand_in.py").write_text(SERVER)

    def run_services() -> None:
        with Services(modules_directory / "logs") as services:
            services.listen("server", ["stand_in", str(modules_directory / "pid")])
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        run_services()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ProcessLookupError):
        os.kill(int((modules_directory / "pid").read_text()), 0)


def test_failures_name_the_log(modules_directory: Path) -> None:
    (modules_directory / "broken.py").write_text("raise SystemExit(3)")
    with Services(modules_directory / "logs") as services:
        for start in (services.run, services.listen):
            with pytest.raises(InternalFault, match="thing ended with exit code 3") as caught:
                start("thing", ["broken"])
            assert caught.value.hint == f"read {modules_directory / 'logs' / 'thing.log'}"


def test_output_of_a_process_that_ends(modules_directory: Path) -> None:
    (modules_directory / "fine.py").write_text("print('{}')")
    start_time = time.monotonic()
    with Services(modules_directory / "logs") as services:
        assert services.run("fine", ["fine"]) == "{}\n"
    assert time.monotonic() - start_time < 10


def test_a_directory_of_something_else_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    assert main(["demo", "--runs", "thesis"]) == ExitCode.USAGE
    assert "has files of another program" in capsys.readouterr().err
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def test_an_older_demo_is_replaced_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.cli.demos.demo.MAKE_DATA", ("no_such_module",))
    assert main(["demo", "--runs", "d"]) == ExitCode.JOB_FAILED
    (tmp_path / "d" / "summary.json").write_text(json.dumps({}))
    assert main(["demo", "--runs", "d"]) == ExitCode.JOB_FAILED
    error_text = capsys.readouterr().err
    assert f"replacing the earlier demo in {tmp_path / 'd'}" in error_text
    log = tmp_path / "d" / "logs" / "make-data.log"
    assert f"error: make-data ended with exit code 1; read {log}" in error_text
    assert not (tmp_path / "d" / "summary.json").exists()


def test_figures_are_accuracy_then_kl() -> None:
    assert _accuracy_and_kl({"eval/kl": 0.5, "eval/accuracy": 0.25}) == (0.25, 0.5)


def test_the_shipped_models_are_those_of_the_checksums() -> None:
    files = sorted(path for path in MODELS.glob("*/*") if path.is_file())
    checksums = dict(
        line.split("  ")[::-1] for line in (MODELS / "SHA256SUMS").read_text().splitlines()
    )
    assert checksums == {
        f"{path.parent.name}/{path.name}": sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert {path.parent.name for path in files} == {"teacher", "student"}
    assert sum(path.stat().st_size for path in files) < 1_500_000
