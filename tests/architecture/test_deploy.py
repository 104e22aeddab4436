"""The commands of docs/training.md are valid jobs with the documented numbers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.models.memory_plan import format_errors, list_cases, plan_memory
from clients.cli.app import main
from clients.config.file import load_job
from clients.config.rl import RLJob

ROOT = Path(__file__).parents[2]
COMMANDS = [
    shlex.split(line)
    for line in (ROOT / "docs" / "training.md").read_text().splitlines()
    if line.startswith("distill run deploy/")
]


def load_jobs_of_page(name: str) -> list[RLJob]:
    configs = []
    for _, _, file, *options in COMMANDS:
        if Path(file).name == name:
            assert set(options[::2]) <= {"--set"}
            config = load_job(ROOT / file, options[1::2]).config
            assert isinstance(config, RLJob)
            configs.append(config)
    return configs


def test_mathematics_has_three_stages() -> None:
    stages = load_jobs_of_page("rl_maths_8gpu.toml")
    assert [job.method.max_new_tokens for job in stages] == [8192, 16384, 24576]
    assert [job.student.model for job in stages[1:]] == ["RUN/export"] * 2
    for job in stages:
        assert (job.train.prompts_per_step, job.method.rollouts_per_prompt) == (128, 8)
        assert job.train.prompts_per_step / job.method.updates_per_step == 64
        assert (job.anchor.tau, job.anchor.update_period) == (0.95, 10)
        assert job.method.temperature == 1


def test_search_is_the_papers() -> None:
    (job,) = load_jobs_of_page("rl_search_8gpu.toml")
    assert job.environment is not None
    assert (job.environment.max_turns, job.environment.passages) == (4, 3)
    assert (job.train.prompts_per_step, job.method.rollouts_per_prompt) == (512, 5)
    assert job.train.prompts_per_step / job.method.updates_per_step == 256
    assert job.train.warmup_steps == int(0.285 * job.max_steps)
    assert (job.anchor.tau, job.anchor.update_period) == (0.9, 10)
    assert (job.method.direction, job.method.top_k) == ("reverse", 32)


@pytest.mark.parametrize("name", ["rl_maths_8gpu.toml", "rl_search_8gpu.toml"])
def test_eight_gpus_are_used(name: str) -> None:
    """Half of the GPUs run vLLM engines for sampling."""
    for job in load_jobs_of_page(name):
        assert (job.gpus, job.train.sharding) == (8, "fsdp2")
        assert (job.rollouts.gpus, job.rollouts.engine, job.rollouts.lag) == (4, "vllm", 1)
        assert (job.train.learning_rate, job.method.beta) == (1e-6, 0.001)


# The size-related keys of the published config.json.
R1_QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
PAGE = (ROOT / "docs" / "training.md").read_text()


def test_the_plan_of_the_page_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(R1_QWEN_1_5B))
    job = str(ROOT / "deploy" / "jobs" / "rl_maths_8gpu.toml")
    assert main(["plan", job, "--memory", "80", "--set", f"student.model={tmp_path}"]) == 0
    command = "$ distill plan deploy/jobs/rl_maths_8gpu.toml --memory 80\n"
    assert command + capsys.readouterr().out in PAGE


def test_the_plan_is_within_a_tenth_of_what_was_measured() -> None:
    """The stored results of the benchmark, compared with the present formulas."""
    text = (ROOT / "benchmarks" / "results" / "memory_plan.json").read_text()
    measurements = json.loads(text)
    loads = {case.label: case.load for case in list_cases()}
    assert measurements.keys() <= loads.keys()
    for name, measurement in measurements.items():
        assert measurement["planned"] == plan_memory(loads[name]), name
        for stage, measured_bytes in measurement["measured"].items():
            assert measurement["planned"][stage] == pytest.approx(measured_bytes, rel=0.1), (
                name,
                stage,
            )
    assert format_errors(measurements) in PAGE
