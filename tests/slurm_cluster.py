"""A Slurm of this machine: munge, a controller and three nodes, all with their own ports and files.

Needs root and the packages slurm-wlm and munge (Debian's have 22.05). Nodes claim more CPUs than
there are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from protos.rpc.ports import free_ports

NODES = ("n1", "n2", "n3")
CPUS = 4  # per node
KILL_WAIT = 10
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
_SECONDS = 60.0

# Two partitions of the same nodes: a job of `urgent` preempts those of `work`, which have 20 s from
# SIGTERM on, and those of `strict`, which have none but KillWait.
_CONF = """\
ClusterName=distill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait={kill_wait}
ReturnToService=2
{gres}
{nodes}
PartitionName=work Nodes=ALL Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=20
PartitionName=strict Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return the reason why Slurm cannot run here, or an empty string."""
    if os.geteuid():
        return "a Slurm of one machine needs root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{absent[0]} is missing: apt-get install slurm-wlm munge" if absent else ""


class SlurmCluster:
    """A running Slurm. `gpus`: number of device files that each node declares; they do not work."""

    def __init__(self, gpus: int = 0) -> None:
        # A short path, because it holds sockets, whose paths have a maximum length.
        self.place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.place.chmod(0o755)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = self.place / "slurm.conf"
        host = socket.gethostname()
        port, *ports = free_ports(1 + len(NODES))
        self._write_configuration(host, port, ports, gpus)
        # For sbatch and other commands, in this process and its children.
        self.environment = {"SLURM_CONF": str(self.conf)}
        (self.place / "state").mkdir()
        # A directory that the last node does not see: another file system is mounted over it there.
        self.unshared = self.place / "unshared"
        self.unshared.mkdir()
        key = self.place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munge += [f"--{name}={self.place}/munge.{name.partition('-')[0]}" for name in _MUNGE_FILES]
        try:
            self._start_program("munged", munge)
            eventually((self.place / "munge.socket").exists, self._read_logs)
            self.start_controller()
            for node in NODES:
                slurmd = ["slurmd", "-D", "-N", node, "-f", str(self.conf)]
                mount_prefix = _HIDE_DIRECTORY if node == NODES[-1] else []
                self._start_program(
                    node, [*mount_prefix, *([str(self.unshared)] if mount_prefix else []), *slurmd]
                )
            eventually(self.is_idle, self._read_logs)
        except BaseException:
            self.close()
            raise

    def _write_configuration(self, host: str, port: int, ports: list[int], gpus: int) -> None:
        node_options = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={CPUS}"
        if gpus:
            node_options += f" Gres=gpu:{gpus}"
            lines = []
            for number in range(gpus):
                device = self.place / f"gpu{number}"
                os.mknod(device, 0o20666, os.makedev(195, number))
                lines.append(f"Name=gpu File={device}\n")
            (self.place / "gres.conf").write_text("".join(lines))
        nodes = [
            f"NodeName={name} Port={node_port} {node_options}"
            for name, node_port in zip(NODES, ports, strict=True)
        ]
        self.conf.write_text(
            _CONF.format(
                host=host,
                port=port,
                place=self.place,
                kill_wait=KILL_WAIT,
                gres="GresTypes=gpu" if gpus else "",
                nodes="\n".join(nodes),
            )
        )

    def start_controller(self) -> None:
        """Start slurmctld with its saved state."""
        self._start_program("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        eventually(lambda: self._try_command("scontrol", "ping") is not None, self._read_logs)

    def kill_controller(self) -> None:
        """Kill slurmctld, as if its machine lost power, after it has saved the state of the jobs.

        It saves every few seconds, and kills jobs that it finds and does not know.
        """
        number, *_ = self.call("squeue", "--noheader", "--format=%A").split()
        start_time = time.time()
        self.call("scontrol", "update", f"jobid={number}", "comment=saved")
        state_file = self.place / "state" / "job_state"
        eventually(
            lambda: state_file.exists() and state_file.stat().st_mtime > start_time, self._read_logs
        )
        controller = self._processes.pop("slurmctld")
        controller.kill()
        controller.wait(20)

    def is_idle(self) -> bool:
        """Whether all nodes are there and have no job."""
        output = self._try_command(
            "sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=work"
        )
        states = [line.split() for line in (output or "").splitlines()]
        return [state for _, state in states] == ["idle"] * len(NODES)

    def jobs(self) -> list[list[str]]:
        """Return number, name and state of all jobs that Slurm remembers, oldest first."""
        output = self.call("squeue", "--noheader", "--states=all", "--sort=i", "--format=%A %j %T")
        return [line.split() for line in output.splitlines()]

    def call(self, *command: str) -> str:
        """Run a command of Slurm and return what it printed."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **self.environment},
        ).stdout

    def close(self) -> None:
        """End all jobs and programs, and remove their files."""
        processes = [psutil.Process(process.pid) for process in self._processes.values()]
        descendants = [child for process in processes for child in process.children(recursive=True)]
        # Each step has a process of Slurm that is not a child of its node's process.
        steps = [process for process in psutil.process_iter() if _is_step_of(process, self.place)]
        descendants += [child for step in steps for child in _children_of(step)] + steps
        for process in [*descendants, *processes]:
            with _suppress_missing_process():
                process.kill()
        for program in self._processes.values():
            program.wait(20)
        shutil.rmtree(self.place, ignore_errors=True)

    def _start_program(self, name: str, command: list[str]) -> None:
        with (self.place / f"{name}.out").open("a") as output:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def _try_command(self, *command: str) -> str | None:
        process = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **self.environment}
        )
        return None if process.returncode else process.stdout

    def _read_logs(self) -> str:
        files = sorted([*self.place.glob("*.out"), *self.place.glob("*.log")])
        return "\n".join(f"{file.name}: {file.read_text()[-1000:]}" for file in files)


# Command prefix that hides a directory from a program: `sh -c ... sh DIRECTORY PROGRAM...`.
_HIDE_DIRECTORY = ["unshare", "--mount", "sh", "-c"]
_HIDE_DIRECTORY += ['mount -t tmpfs none "$1" && shift && exec "$@"', "sh"]
_MUNGE_FILES = ("socket", "pid-file", "log-file", "seed-file")


def eventually(condition: Callable[[], object], describe_state: Callable[[], str]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, describe_state()
        time.sleep(0.1)


def _suppress_missing_process() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(psutil.NoSuchProcess)


def _is_step_of(process: psutil.Process, place: Path) -> bool:
    try:
        return process.name() == "slurmstepd" and process.environ().get("SLURM_CONF") == str(
            place / "slurm.conf"
        )
    except psutil.Error:
        return False


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    with _suppress_missing_process():
        return process.children(recursive=True)
    return []
