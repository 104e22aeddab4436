"""A job from an empty machine that shares nothing with the server: sent, trained, pulled."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import clients
from clients.runs.directory import RunDirectory
from tests import small_disk
from tests.end_to_end.processes import ENVIRONMENT, MakeServer, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SOURCE = Path(clients.__file__).parent.parent


class EmptyMachine:
    """Another home, and disks of its own: the server cannot see its files, nor it the server's.

    The name of its directory exists on both.
    """

    def __init__(self, path: Path, server_runs: Path) -> None:
        if reason := small_disk.why_not():
            pytest.skip(reason)
        path.mkdir()
        self.path, self.runs = path, server_runs

    def run(self, *lines: str) -> str:
        """Run shell commands; what is on its disk is lost at the end. Returns stdout."""
        place, runs = shlex.quote(str(self.path)), shlex.quote(str(self.runs))
        script = ["set -e", f"mount -t tmpfs tmpfs {place}", f"mount -t tmpfs tmpfs {runs}"]
        script += [f"cd {place}", *lines]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "\n".join(script)],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "HOME": str(self.path), "PYTHONPATH": str(SOURCE)},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert not any(self.path.iterdir()), "its files are its own"
        return done.stdout


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_nothing_is_shared(
    material: Material,
    teacher: str,
    make_server: MakeServer,
    undisturbed: RunDirectory,
    tmp_path: Path,
) -> None:
    """The same bits as a run on the machine of the files."""
    from tests.student_trainer.tiny import job

    server = make_server()
    machine = EmptyMachine(tmp_path / "empty", server.runs)
    config = job(material, teacher).model_dump(mode="json", exclude_none=True)
    config["student"]["model"] = "student"
    config["data"]["path"] = str(machine.path / "train.jsonl")
    distill = f"{sys.executable} -m clients --server {server.address}"
    printed = machine.run(
        f"cp -r {material.student} student",
        f"cp {material.prompts} train.jsonl",
        f"cat > job.yaml <<'END'\n{json.dumps(config)}\nEND",
        # Without its files, the job cannot be queued.
        f"! {distill} submit job.yaml 2> refused",
        "grep -q 'distill submit --upload' refused",
        f"{distill} submit job.yaml --upload --dry-run > /dev/null",
        f'test -z "$({distill} ls)"',
        f"{distill} submit job.yaml --upload > /dev/null",
        "rm -r train.jsonl student",
        f"{distill} --json watch @last > /dev/null",
        f"{distill} pull @last -o pulled > /dev/null",
        "sha256sum pulled/model.safetensors",
        # From files that are the same, nothing is sent again.
        f"cp {material.prompts} train.jsonl",
        f"{distill} submit job.yaml --upload --set student.model=pulled 2> told",
        "grep 'the server has' told",
    )
    assert printed.split()[0] == weights(undisturbed)
    assert "data.path: the server has its" in printed
    runs = [RunDirectory(path.parent) for path in server.runs.glob("*/job.json")]
    for run in runs:
        used = run.config()
        assert Path(used.student.model).is_relative_to(server.runs / ".uploads")
    shutil.rmtree(tmp_path / "empty")
