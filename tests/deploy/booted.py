"""A Debian that systemd has booted, in a container of systemd-nspawn. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.deploy.containers import debian

_SECONDS = 120.0


def missing_requirement() -> str:
    """Return why no container can boot on this machine; "" if one can."""
    if os.geteuid():
        return "systemd-nspawn needs root"
    return "" if shutil.which("systemd-nspawn") else "needs systemd-nspawn: make test-deploy"


class Booted:
    """`binds`: paths of this machine mounted read-only in the container; `log`: console output."""

    def __init__(self, root: Path, binds: Mapping[Path, str], log: Path) -> None:
        debian(root, "systemd", "systemd-sysv", "dbus")
        (root / "etc" / "machine-id").write_text("")
        self._log = log
        # --register=no: do not register with this machine's systemd, if it has one.
        command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network"]
        command += [f"--directory={root}", "--boot"]
        command += [
            f"--bind-ro={host_path}:{container_path}" for host_path, container_path in binds.items()
        ]
        with log.open("wb") as output:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            self.eventually(lambda: self._find_init() is not None)
            self.eventually(
                lambda: self._read_output("systemctl is-system-running") in _BOOTED_STATES
            )
        except BaseException:
            self.close()
            raise

    def run(self, commands: str) -> str:
        """Run bash commands as root and return their standard output."""
        process = self._run(commands)
        assert process.returncode == 0, (
            f"{commands}: {process.stdout}{process.stderr}{self._read_console()}"
        )
        return process.stdout

    def main_pid(self, unit: str) -> int:
        """Return the pid of a unit's main process inside the container."""
        return int(self.run(f"systemctl show --property=MainPID --value {unit}"))

    def eventually(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert self._nspawn.poll() is None, self._read_console()
            assert time.monotonic() < deadline, self._read_console()
            time.sleep(0.2)

    def close(self) -> None:
        """Kill the container and all of its processes."""
        if init := self._find_init():
            init.kill()  # the kernel kills the rest of its pid namespace
        else:
            self._nspawn.kill()
        self._nspawn.wait(30)

    def _run(self, commands: str) -> subprocess.CompletedProcess[str]:
        init = self._find_init()
        assert init is not None, self._read_console()
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        enter = ["nsenter", "--target", str(init.pid), *spaces, "--", "env", "-i", f"PATH={_PATH}"]
        return subprocess.run(
            [*enter, "bash", "-euo", "pipefail", "-c", commands], capture_output=True, text=True
        )

    def _read_output(self, command: str) -> str:
        return self._run(command).stdout.strip()

    def _find_init(self) -> psutil.Process | None:
        for child in psutil.Process(self._nspawn.pid).children():
            if child.name() == "systemd":
                return child
        return None

    def _read_console(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


_BOOTED_STATES = ("running", "degraded")
_PATH = "/opt/distill-service/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
