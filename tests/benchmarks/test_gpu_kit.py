"""The kit for a first run on a GPU: its files and limits, and a rehearsal without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.gpu.kit import __main__ as kit
from benchmarks.gpu.kit import run

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / ".venv-gpu-machine" / "bin"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_rows" name="test_a"/>
<testcase classname="tests.gpu.test_rows" name="test_b"><skipped message="needs a GPU"/></testcase>
<testcase classname="tests.gpu.test_rows" name="test_c">
<failure message="AssertionError: 0.3&#10;assert 0.3 &lt; 0.1">...</failure></testcase>
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def kit_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SOURCE", ROOT)


def test_a_program_is_ended_at_its_limit(tmp_path: Path) -> None:
    """With its children, and after an interrupt, at which pytest writes its report."""
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
try:
    time.sleep(600)
except KeyboardInterrupt:
    open({str(tmp_path / "interrupted")!r}, "w").close()
"""
    with (tmp_path / "log").open("wb") as log:
        assert run.run_command(["-c", code], log, 5) is None
    assert (tmp_path / "interrupted").exists()
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(FileNotFoundError):  # a zombie has ended too
        while "(zombie)" not in Path(f"/proc/{child}/status").read_text():
            time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_program(code: int, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert run.run_command(["-c", f"raise SystemExit({code})"], log, 60) == code


def test_a_report_names_its_failures(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    summary, failures = run.read_report(report)
    assert summary == "1 passed, 1 failed, 1 skipped"
    assert failures == ("tests/gpu/test_rows.py::test_c: AssertionError: 0.3",)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run-gpu", *arguments])
    try:
        return run.main()
    except SystemExit as error:
        return int(error.code or 0)


def test_another_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PYTHON", (3, 1))
    assert run_main(monkeypatch, "--out", str(tmp_path)) == 2
    assert "packages are for Python 3.1 on x86_64, and this is Python 3." in capsys.readouterr().err


@pytest.fixture
def own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(run, "PROCESSOR", platform.machine())
    monkeypatch.setattr(run, "read_facts", lambda out: {"gpus": 1})


@pytest.mark.usefixtures("own_python")
def test_a_directory_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_main(monkeypatch, "--out", str(tmp_path / "file")) == 2
    assert "--out: [Errno 17] File exists" in capsys.readouterr().err


@pytest.mark.usefixtures("own_python")
def test_an_interrupted_run_leaves_no_result_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_command", interrupt)
    for name in ("ceilings", "gpu.ceilings", "tests"):
        (tmp_path / f"{name}.json").write_text('{"ended": "passed"}')
    assert run_main(monkeypatch, "ceilings", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert [path.name for path in tmp_path.glob("*.json")] == ["tests.json"]


def test_half_a_report_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write_half(*_: object) -> None:
        (tmp_path / "tests.xml").write_text(REPORT[:100])

    monkeypatch.setattr(run, "run_command", write_half)
    result = run.run_part("tests", tmp_path, cpu=False)
    assert (result.ended, result.summary) == ("out of time", "0 of 1 programs")


def test_every_test_with_the_mark_is_in_a_part() -> None:
    marked = run.list_marked_files()
    assert "tests/student_trainer/losses/fused/test_triton.py" in marked
    assert not [name for name in marked if name.startswith("tests/gpu/")]
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert "mark.gpu" in path.read_text(), path


def test_the_kit_has_the_source_of_its_parts() -> None:
    source = set(kit.list_source())
    assert {"pyproject.toml", "tests/conftest.py", "tests/gpu/test_rows.py"} <= source
    assert {"benchmarks/gpu/ceilings.py", "student_trainer/assembly.py"} <= source
    assert not [path for path in source if path.endswith(".png")]


@pytest.mark.slow
@pytest.mark.skipif(
    not MACHINE.exists(), reason="make rehearse-gpu-kit makes the environment of the machine"
)
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")),
    reason="needs root, unshare and ip",
)
def test_every_part_runs_in_the_machines_versions_without_a_network(tmp_path: Path) -> None:
    archive = tmp_path / "kit.tar.gz"
    command = [sys.executable, "-m", "benchmarks.gpu.kit", "--out", str(archive)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="tar")
    environment = {"PATH": f"{MACHINE}:/usr/bin:/bin", "HOME": str(tmp_path)}
    # The namespace has a loopback device, and no other.
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$0" "$@"']
    command += [str(tmp_path / kit.FOLDER / "run-gpu"), "--cpu", "--out", str(tmp_path / "out")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    for part in ("tests", "checks", "ceilings"):
        assert json.loads((tmp_path / "out" / f"{part}.json").read_text())["ended"] == "passed"
