"""Shims and the runner without a server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from clients.runs.file_system import locked_directory
from distill_server.runners.interface import Exited, Lost, Running
from distill_server.runners.local.process import (
    claim,
    family,
    identity_of,
    kill_family,
    send_signal,
)
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Share
from distill_server.runners.trainer_environment import trainer_environment
from tests.distill_server.conftest import eventually

# The fixture `run` waits for every shim at the end of a test.
RUNNERS: list[LocalRunner] = []


class Command:
    """A command factory for one line of Python."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __call__(
        self, run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]:
        return [sys.executable, "-S", "-c", self.code]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    yield run
    for card in run.path.glob("logs/*/shim.json"):
        kill_family(json.loads(card.read_text())["mark"])
    for runner in RUNNERS:
        for shim in runner._children.values():
            shim.wait(10)
    RUNNERS.clear()


def start(run: RunDirectory, code: str) -> LocalRunner:
    runner = LocalRunner(command=Command(code))
    RUNNERS.append(runner)
    runner.start(run, attempt=1, processes=1, from_step=None, share=Share(cpus=2))
    return runner


def card_of(run: RunDirectory) -> dict[str, object]:
    path = run.logs(1) / "shim.json"
    eventually(path.exists)
    card: dict[str, object] = json.loads(path.read_text())
    return card


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('hello')", Exited(0)),
        ("raise SystemExit(3)", Exited(3)),
        ("import os; os.kill(os.getpid(), 9)", Exited(-9)),
        ("import os; os.abort()", Exited(-6)),
    ],
)
def test_exit_is_recorded(run: RunDirectory, code: str, expected: Exited) -> None:
    runner = start(run, code)
    eventually(lambda: runner.poll(run, 1) != Running())
    assert runner.poll(run, 1) == expected
    # A new runner gets the same answer.
    assert LocalRunner().poll(run, 1) == expected


def test_output_is_appended_to_the_log(run: RunDirectory) -> None:
    run.logs(1).mkdir(parents=True)
    run.log_file(1).write_text("before\n")
    runner = start(run, "import sys; print('out'); print('err', file=sys.stderr)")
    eventually(lambda: runner.poll(run, 1) == Exited(0))
    assert run.log_file(1).read_text() == "before\nout\nerr\n"


def test_program_that_does_not_exist(run: RunDirectory) -> None:
    runner = LocalRunner(command=lambda *a, **k: ["/no/such/program"])
    RUNNERS.append(runner)
    runner.start(run, attempt=1, processes=1, from_step=None, share=Share(cpus=2))
    eventually(lambda: runner.poll(run, 1) == Exited(127))
    assert "cannot run /no/such/program" in run.log_file(1).read_text()


def test_stop_is_sigterm_first(run: RunDirectory) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: sys.exit(7))\n"
        "print('up')\ntime.sleep(99)"
    )
    runner = start(run, code)
    eventually(lambda: run.log_file(1).read_text() == "up\n")
    runner.stop(run, 1, now=False)
    runner.stop(run, 1, now=False)
    eventually(lambda: runner.poll(run, 1) != Running())
    assert runner.poll(run, 1) == Exited(7)


NONSENSE = ["", "{", "[]", "null", '{"pid": "x"}', '{"code": "x"}', "\0"]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_files_that_are_nonsense(run: RunDirectory, nonsense: str) -> None:
    """The runner that started the shim still has it; for other runners the attempt is lost."""
    runner = start(run, "import time; print('up')\ntime.sleep(99)")
    eventually(lambda: run.log_file(1).exists() and run.log_file(1).read_text() == "up\n")
    mark = str(card_of(run)["mark"])
    (run.logs(1) / "exit.json").write_text(nonsense)
    assert runner.poll(run, 1) == Running()
    (run.logs(1) / "shim.json").write_text(nonsense)
    assert runner.poll(run, 1) == Running()
    runner.stop(run, 1, now=True)
    eventually(lambda: family(mark) == [])
    eventually(lambda: runner.poll(run, 1) == Exited(-9))
    (run.logs(1) / "exit.json").write_text(nonsense)
    eventually(lambda: runner.poll(run, 1) == Lost(blameless=False))
    shutil.rmtree(run.logs(1))


def test_stop_now_kills_the_whole_family(run: RunDirectory) -> None:
    """Also a process in another session, which a signal to the group would miss."""
    code = (
        "import signal, subprocess, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        "print('up')\ntime.sleep(99)"
    )
    runner = start(run, code)
    eventually(lambda: run.log_file(1).read_text() == "up\n")
    mark = str(card_of(run)["mark"])
    assert len(family(mark)) == 2
    runner.stop(run, 1, now=True)
    eventually(lambda: runner.poll(run, 1) == Exited(-9))
    assert family(mark) == []


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_frozen_shim_is_continued_to_stop_its_trainer(
    run: RunDirectory, has_restarted: bool
) -> None:
    """Frozen with the trainer, as by `kill -STOP` of an administrator."""
    runner = start(run, "import time; time.sleep(600)")
    card = card_of(run)
    eventually(lambda: runner.poll(run, 1) == Running())
    for pid in (card["pid"], card["child_pid"]):
        os.kill(int(str(pid)), signal.SIGSTOP)
    server_runner = LocalRunner() if has_restarted else runner
    server_runner.stop(run, 1, now=True)
    eventually(lambda: server_runner.poll(run, 1) == Exited(-9))
    assert family(str(card["mark"])) == []


def test_leftovers_are_killed_when_the_trainer_ends(run: RunDirectory) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)"
    runner = start(run, code)
    eventually(lambda: runner.poll(run, 1) == Exited(0))
    assert family(str(card_of(run)["mark"])) == []


# An orphan in another session without the mark: as vLLM's processes, which are renamed.
HIDDEN = (
    "import subprocess, time\n"
    "subprocess.run(['sh', '-c', 'env -i setsid sleep 98765 & echo $!'])\n"
    "print('up', flush=True)\n"
)


def read_hidden_pid(run: RunDirectory) -> int:
    log = run.log_file(1)
    eventually(lambda: log.exists() and log.read_text().endswith("up\n"))
    return int(log.read_text().split()[0])


def test_a_process_without_the_mark_ends_with_its_trainer(run: RunDirectory) -> None:
    runner = start(run, HIDDEN)
    pid = read_hidden_pid(run)
    eventually(lambda: runner.poll(run, 1) == Exited(0))
    assert identity_of(pid) is None


def test_a_process_without_the_mark_ends_with_its_shim(run: RunDirectory) -> None:
    runner = start(run, HIDDEN + "time.sleep(99)")
    identity = identity_of(read_hidden_pid(run))
    assert identity is not None
    mark = str(card_of(run)["mark"])
    # The shell's child has the mark until it executes `env`.
    eventually(lambda: identity not in family(mark))
    processes = run.logs(1) / "processes.json"
    eventually(lambda: processes.exists() and str(identity.pid) in processes.read_text())
    os.kill(int(str(card_of(run)["pid"])), signal.SIGKILL)
    eventually(lambda: runner.poll(run, 1) == Lost(blameless=False))
    assert identity_of(identity.pid) is None


def test_a_name_of_any_bytes_disturbs_no_shim(run: RunDirectory) -> None:
    """A process name in Cyrillic that the kernel truncates in the middle of a letter."""
    name = "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([0xD0, 0xBE, 0xD0]), 0, 0, 0)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{name}; print(1, flush=True); time.sleep(99)"],
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert identity_of(process.pid) is not None
            runner = start(run, "import time; time.sleep(0.3)")
            eventually(lambda: runner.poll(run, 1) == Exited(0))
        finally:
            process.kill()


def test_a_process_of_another_user_is_left_alone(tmp_path: Path) -> None:
    """As one started by `sudo`: it cannot be signalled, and does not block `kill_family`."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of others")
    code = (
        "import os, sys\n"
        "from distill_server.runners.local.process import kill_family\n"
        "null = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2)]\n"
        "os.posix_spawn('/bin/sleep', ['sleep', '98764'], {}, file_actions=null)\n"
        "os.setuid(65534)\n"
        "print(kill_family('no mark', 5.0, under=os.getpid()))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    subprocess.run(["pkill", "-f", "^sleep 98764$"], check=True)  # it was left alone
    assert process.stdout == "True\n", process.stderr


def test_a_foreign_proc_names_no_process() -> None:
    """Inside a pid namespace without a /proc of its own, a pid is another process's."""
    if os.geteuid() != 0:
        pytest.skip("only root may make namespaces")
    code = (
        "import os\n"
        "from distill_server.runners.local.process import descendants, family\n"
        "print(descendants(1), descendants(os.getpid()), family('x'))\n"
    )
    command = ["unshare", "-pf", sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare failed" in process.stderr:
        pytest.skip(process.stderr.strip())
    assert process.stdout == "[] [] []\n", process.stderr


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_list_of_processes_that_is_nonsense(run: RunDirectory, nonsense: str) -> None:
    runner = start(run, "import time; time.sleep(99)")
    card = card_of(run)
    os.kill(int(str(card["pid"])), signal.SIGKILL)
    (run.logs(1) / "processes.json").write_text(nonsense)
    eventually(lambda: runner.poll(run, 1) == Lost(blameless=False))
    assert family(str(card["mark"])) == []


def test_trainer_ignoring_sigterm_is_killed_after_the_grace(run: RunDirectory) -> None:
    directory = run.logs(1)
    directory.mkdir(parents=True)
    code = (
        "import signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(99)"
    )
    log = run.log_file(1)
    trainer = [sys.executable, "-S", "-c", code]
    shim = subprocess.Popen(
        [sys.executable, "-m", "distill_server.runners.local.shim", str(log), "0.3", "--", *trainer]
    )
    eventually(lambda: log.exists() and log.read_text() == "up\n")
    start_time = time.monotonic()
    shim.terminate()
    assert shim.wait(20) == 0
    assert time.monotonic() - start_time >= 0.3
    assert json.loads((directory / "exit.json").read_text())["code"] == -9


def test_killed_shim_takes_its_trainer_along(run: RunDirectory) -> None:
    runner = start(run, "import time; time.sleep(99)")
    card = card_of(run)
    os.kill(int(str(card["pid"])), signal.SIGKILL)
    eventually(lambda: runner.poll(run, 1) != Running())
    assert runner.poll(run, 1) == Lost(blameless=False)
    assert family(str(card["mark"])) == []


def test_heartbeat(run: RunDirectory) -> None:
    start(run, "import time; time.sleep(99)")
    heartbeat = run.logs(1) / "heartbeat"
    eventually(heartbeat.exists)
    first_beat = heartbeat.stat().st_mtime_ns
    eventually(lambda: heartbeat.stat().st_mtime_ns > first_beat)


def test_reused_pid_is_never_signalled(run: RunDirectory) -> None:
    """The pid of the shim now belongs to another process, started at another time or boot."""
    with subprocess.Popen(["sleep", "99"]) as stranger:
        identity = identity_of(stranger.pid)
        assert identity is not None
        run.logs(1).mkdir(parents=True)
        (run.logs(1) / "claim").touch()
        for stale_identity in (
            replace(identity, start_time=identity.start_time - 1),
            replace(identity, boot_id="old"),
        ):
            card = {
                **vars(stale_identity),
                "child_pid": stranger.pid,
                "child_start_time": 1,
                "mark": "none",
            }
            (run.logs(1) / "shim.json").write_text(json.dumps(card))
            runner = LocalRunner()
            runner.stop(run, 1, now=False)
            runner.stop(run, 1, now=True)
            assert isinstance(runner.poll(run, 1), Lost)
            assert not send_signal(stale_identity, signal.SIGKILL)
        time.sleep(0.1)
        assert stranger.poll() is None
        assert send_signal(identity, signal.SIGKILL)
    assert identity_of(identity.pid) != identity
    assert not send_signal(identity, signal.SIGKILL)


def test_attempt_that_never_started_is_claimed(run: RunDirectory) -> None:
    """A shim that comes late finds the claim and starts nothing."""
    run.logs(1).mkdir(parents=True)
    assert LocalRunner().poll(run, 1) == Lost(blameless=True)
    late_runner = start(run, "print('started')")
    eventually(lambda: late_runner.poll(run, 1) != Running())
    assert late_runner.poll(run, 1) == Lost(blameless=False)
    assert run.log_file(1).read_text() == ""


def test_claimed_attempt_of_another_server_is_waited_for(run: RunDirectory) -> None:
    run.logs(1).mkdir(parents=True)
    assert claim(run.logs(1))
    assert not claim(run.logs(1))
    assert LocalRunner().poll(run, 1) == Running()


def test_environment_is_an_allow_list() -> None:
    server_variables = {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "AWS_SECRET": "s",
        "PYTHONPATH": "x",
        "LC_ALL": "C",
    }
    environment = trainer_environment(server_variables, Share(cpus=1), processes=4)
    assert environment == {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }


def test_settings_of_engines_networks_and_storage_are_passed_and_no_key() -> None:
    passed_names = {
        "VLLM_USE_V1",
        "TRITON_CACHE_DIR",
        "GLOO_SOCKET_IFNAME",
        "FI_PROVIDER",
        "UCX_TLS",
    }
    passed_names |= {"AWS_REGION", "AWS_ENDPOINT_URL", "AWS_SHARED_CREDENTIALS_FILE"}
    passed_names |= {"GOOGLE_APPLICATION_CREDENTIALS"}
    dropped_names = {
        "VLLM_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
    }
    server_variables = dict.fromkeys(passed_names | dropped_names, "x")
    trainer_variables = trainer_environment(server_variables, Share(cpus=1), processes=1)
    assert passed_names <= trainer_variables.keys()
    assert not dropped_names & trainer_variables.keys()


def test_no_code_of_the_working_directory_is_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the shim, not by a trainer started with `-m`, and not by its children."""
    module_text = f"import pathlib\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\n"
    working_directory = tmp_path / "here"
    for directory in (working_directory, run.path):
        directory.mkdir(exist_ok=True)
        for name in ("random.py", "contextlib.py", "timeit.py", "json.py", "student_trainer.py"):
            (directory / name).write_text(module_text)
    monkeypatch.chdir(working_directory)
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'timeit', '-n1', '0'])"
    runner = start(run, child)
    eventually(lambda: runner.poll(run, 1) == Exited(0))
    assert "loop" in run.log_file(1).read_text()
    assert not (tmp_path / "executed").exists()


def test_threads_are_shared_by_the_processes_of_a_job(run: RunDirectory) -> None:
    runner = start(run, "import os; print(os.environ['OMP_NUM_THREADS'])")
    eventually(lambda: runner.poll(run, 1) == Exited(0))
    assert run.log_file(1).read_text() == "2\n"


def test_weights_in_memory_end_with_a_killed_trainer(run: RunDirectory) -> None:
    """The shim deletes what the trainer had locked; another trainer's directory is left alone."""
    own_directory = locked_directory()
    assert own_directory is not None
    try:
        start(
            run,
            f"import os, sys; sys.path.append({str(Path(__file__).parents[3])!r})\n"
            "from clients.runs.file_system import locked_directory\n"
            "print(locked_directory(), flush=True); os.kill(os.getpid(), 9)",
        )
        eventually((run.logs(1) / "exit.json").exists)
        trainer_directory = run.log_file(1).read_text().strip()
        assert trainer_directory.startswith("/dev/shm/distill-weights-")
        assert not Path(trainer_directory).exists()
        assert own_directory.exists()
    finally:
        own_directory.rmdir()


def test_shim_is_light() -> None:
    code = (
        "import sys, distill_server.runners.local.shim\n"
        "print([m for m in ('grpc', 'pydantic') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"
