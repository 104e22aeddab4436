"""Real questions, a real BPE vocabulary, the shipped job file: the KL to the teacher halves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from protos.rpc.ports import free_ports
from tests.documents import ROOT, blocks
from tests.end_to_end.processes import ENVIRONMENT, metrics_of

QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
# Changes that shorten the example from a quarter of an hour to a minute.
SMALLER = {
    "--batch 16": "--batch 8 --max-tokens 128",
    "--layers 3 --width 128 --steps 700": "--layers 2 --width 64 --steps 90",
    "--steps 100": "--steps 10",
    "max_steps=400": "max_steps=70",
    "eval.prompts=64": "eval.prompts=16 --set eval.every=70",
    "max_new_tokens=64": "max_new_tokens=32",
    "prompts_per_step=16": "prompts_per_step=8",
    "learning_rate=3e-3": "learning_rate=5e-3",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not QUESTIONS.is_file(), reason="needs GSM8K beside the checkout (../shared)")
def test_distil_on_real_questions(tmp_path: Path) -> None:
    """Run the commands of docs/operations.md with the changes of SMALLER."""
    start_block, train_block = blocks("docs/operations.md", "gsm8k")
    port = free_ports(1)[0]
    changes = {
        **SMALLER,
        "path/to/train.jsonl": str(QUESTIONS),
        "--port 50052": f"--port {port} --no-cache",
        "--set max_steps": f"--set teacher.address=localhost:{port} --set max_steps",
    }
    wait_for_teacher = "until grep -q 'teacher listening on' out; do sleep 0.2; done\n"
    script = start_block.body + wait_for_teacher + train_block.body
    for documented, replacement in changes.items():
        assert script.count(documented) == 1, documented
        script = script.replace(documented, replacement)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    assert '"vocabulary": 4096' in run_script(script, tmp_path)
    (path,) = (tmp_path / "runs").glob("on-policy-*")
    evaluations = [line["eval/kl"] for line in metrics_of(RunDirectory(path)) if "eval/kl" in line]
    print(f"held-out KL to the teacher: {evaluations}")
    assert evaluations[-1] <= evaluations[0] / 2


def run_script(script: str, directory: Path) -> str:
    """Run the script, end the teacher that it leaves behind, and return the output."""
    output_file, error_file = directory / "out", directory / "err"
    with output_file.open("w") as stdout, error_file.open("w") as stderr:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            stdout=stdout,
            stderr=stderr,
            cwd=directory,
            env={**ENVIRONMENT, "HOME": str(directory)},
            start_new_session=True,
        )
    try:
        code = process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert code == 0, error_file.read_text()
    return output_file.read_text()
