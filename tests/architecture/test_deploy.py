"""The commands of docs/deployment.md are jobs, with the numbers that it claims."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from clients.config.file import load_job
from clients.config.rl import RLJob

ROOT = Path(__file__).parents[2]
COMMANDS = [
    shlex.split(line)
    for line in (ROOT / "docs" / "deployment.md").read_text().splitlines()
    if line.startswith("distill run deploy/")
]


def jobs(name: str) -> list[RLJob]:
    found = []
    for _, _, file, *options in COMMANDS:
        if Path(file).name == name:
            assert set(options[::2]) <= {"--set"}
            config = load_job(ROOT / file, options[1::2]).config
            assert isinstance(config, RLJob)
            found.append(config)
    return found


def test_mathematics_has_three_stages() -> None:
    stages = jobs("rl_maths_8gpu.toml")
    assert [job.method.max_new_tokens for job in stages] == [8192, 16384, 24576]
    assert [job.student.model for job in stages[1:]] == ["RUN/export"] * 2
    for job in stages:
        assert (job.train.prompts_per_step, job.method.rollouts_per_prompt) == (128, 8)
        assert job.train.prompts_per_step / job.method.updates_per_step == 64
        assert (job.anchor.tau, job.anchor.update_period) == (0.95, 10)
        assert job.method.temperature == 1


def test_search_is_the_papers() -> None:
    (job,) = jobs("rl_search_8gpu.toml")
    assert job.environment is not None
    assert (job.environment.max_turns, job.environment.passages) == (4, 3)
    assert (job.train.prompts_per_step, job.method.rollouts_per_prompt) == (512, 5)
    assert job.train.prompts_per_step / job.method.updates_per_step == 256
    assert job.train.warmup_steps == int(0.285 * job.max_steps)
    assert (job.anchor.tau, job.anchor.update_period) == (0.9, 10)
    assert (job.method.direction, job.method.top_k) == ("reverse", 32)


@pytest.mark.parametrize("name", ["rl_maths_8gpu.toml", "rl_search_8gpu.toml"])
def test_eight_processes_have_a_share_each(name: str) -> None:
    for job in jobs(name):
        assert (job.train.processes, job.train.sharding) == (8, "fsdp2")
        assert (job.train.learning_rate, job.method.beta) == (1e-6, 0.001)
