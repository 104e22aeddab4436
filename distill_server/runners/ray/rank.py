"""The Ray actor that runs a trainer process or a rollout service. All nodes import this module."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from distill_server.runners.interface import KILL_GRACE_SECONDS
from distill_server.runners.local.process import send_signal
from distill_server.runners.local.shim_files import card_of, exit_code_of, kill_processes
from distill_server.runners.ray.places import ActorPlace
from distill_server.runners.trainer_environment import allowed_variables
from protos.rpc.ports import free_ports


class Rank:
    """Runs one process under a shim; the process ends if this actor ends.

    `directory` holds the shim's files.
    """

    def place(self) -> ActorPlace:
        """Return the node and GPUs of this actor, and a free port of the node."""
        context = ray.get_runtime_context()
        (port,) = free_ports(1, host="")
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), gpus, port)

    def run(
        self,
        directory: Path,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        variables: Mapping[str, str],
        folder: str,
    ) -> int:
        """Run Python with these arguments to its end; return its exit code, or -N for signal N.

        The node's own variables override the server's `environment`; `variables` override both.
        """
        directory.mkdir(exist_ok=True)
        shim = [
            sys.executable,
            "-P",
            "-m",
            "distill_server.runners.local.shim",
            str(log),
            str(KILL_GRACE_SECONDS),
        ]
        shim += ["--rank", str(directory), "--", sys.executable, *arguments]
        shim_watch, shim_stdin = socket.socketpair()
        with shim_watch:
            with shim_stdin, log.open("ab") as output:
                subprocess.run(
                    shim,
                    stdin=shim_stdin.fileno(),
                    stdout=output,
                    stderr=output,
                    env={**environment, **allowed_variables(os.environ), **variables},
                    cwd=folder if os.path.isdir(folder) else directory,
                    start_new_session=True,
                    check=True,
                )  # returns at once: the shim detaches itself
            shim_watch.recv(1)  # blocks until the shim ends; it never sends data
        code = exit_code_of(directory)
        if code is None and (card := card_of(directory)):
            kill_processes(directory, card)  # the shim was killed, so its processes may still run
        return -signal.SIGKILL if code is None else code

    def stop(self, directory: Path, *, now: bool) -> None:
        """Send SIGTERM, and SIGKILL after a grace period; with `now`, only SIGKILL."""
        if card := card_of(directory):
            send_signal(card.shim, signal.SIGQUIT if now else signal.SIGTERM)
