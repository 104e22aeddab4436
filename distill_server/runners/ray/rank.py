"""An actor of Ray beside one process of a trainer. It is imported on the nodes of a cluster."""

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
from distill_server.runners.local.process import kill_family, send_signal
from distill_server.runners.local.shim_files import card_of, exit_code_of
from distill_server.runners.ray.places import Place
from distill_server.runners.trainer_environment import allowed


class Rank:
    """Runs one process under a shim that ends with this actor; `directory` has the shim's files."""

    def place(self) -> Place:
        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpus, port)

    def run(
        self,
        directory: Path,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        variables: Mapping[str, str],
        folder: str,
    ) -> int:
        """Python with these arguments, until it ends: its code, or minus the signal's number.

        The node's own variables stand before those of the server: they know the machine.
        """
        directory.mkdir(exist_ok=True)
        shim = [
            sys.executable,
            "-m",
            "distill_server.runners.local.shim",
            str(log),
            str(KILL_GRACE_SECONDS),
        ]
        shim += ["--rank", str(directory), "--", sys.executable, *arguments]
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, log.open("ab") as output:
                subprocess.run(
                    shim,
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    env={**environment, **allowed(os.environ), **variables},
                    cwd=folder if os.path.isdir(folder) else directory,
                    start_new_session=True,
                    check=True,
                )  # returns at once: it leaves a child that nobody else has
            ours.recv(1)  # nothing comes but the end
        code = exit_code_of(directory)
        if code is None and (card := card_of(directory)):
            kill_family(card.mark)  # somebody killed the shim
        return -signal.SIGKILL if code is None else code

    def stop(self, directory: Path, *, now: bool) -> None:
        """SIGTERM, and SIGKILL after a grace; `now`: SIGKILL."""
        if card := card_of(directory):
            send_signal(card.shim, signal.SIGQUIT if now else signal.SIGTERM)
