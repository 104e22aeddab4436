"""Invalid keys of RL jobs: one sentence with the line and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.config.file import load_job
from clients.config.rl import RLJob
from clients.preflight.files import check_files
from protos.errors import InvalidInput

JOB = """\
student.model = "m"
data.path = "d.jsonl"
reward.type = "exact_match"
method.type = "rl"
"""


def load_rl_job(tmp_path: Path, text: str, *overrides: str) -> RLJob:
    path = tmp_path / "a.toml"
    path.write_text(text)
    config = load_job(path, overrides).config
    assert isinstance(config, RLJob)
    return config


def test_four_lines_are_a_job(tmp_path: Path) -> None:
    config = load_rl_job(tmp_path, JOB)
    assert (config.anchor.tau, config.anchor.update_period, config.method.beta) == (0.95, 10, 0.001)
    assert (config.teacher, config.environment, config.method.top_k) == (None, None, 32)
    assert (config.method.tail_mode, config.draws) == ("bucket+draws", 48)


def test_forward_kl_has_another_default_tail(tmp_path: Path) -> None:
    config = load_rl_job(tmp_path, JOB, "method.divergence=forward_kl")
    assert (config.method.tail_mode, config.draws) == ("bucket+sampled", 0)


def test_a_task_brings_its_own_prompts(tmp_path: Path) -> None:
    text = 'student.model = "m"\nreward.type = "reasoning_gym:basic_arithmetic"\n'
    assert load_rl_job(tmp_path, text + 'method.type = "rl"\n').data is None


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("method.gae_lambda=2.0", "method.gae_lambda", "less than or equal to 1"),
        ("method.rollouts_per_prompt=1", "method.rollouts_per_prompt", "must be 2 or more"),
        ("method.estimator=k3", "method.estimator", "needs top_k = 0"),
        ("method.importance_clip=[2.0, 0.5]", "method.importance_clip", "[MIN, MAX]"),
        ("method.importance_mask=[5.0, 0.5]", "method.importance_mask", "[MIN, MAX]"),
        ("method.importance_clip=[0.5]", "method.importance_clip", "too few values (got [0.5])"),
        ("method.importance_clip=[0.5, 2, 3]", "method.importance_clip", "at most 2 items"),
        ("method.dynamic_sampling=0", "method.dynamic_sampling", "greater than or equal to 1"),
        ("method.epochs_per_step=0", "method.epochs_per_step", "greater than or equal to 1"),
        ("train.adam_betas=[0.9, 1.0]", "train.adam_betas.1", "less than 1"),
        (
            "train.adam_betas=0.9",
            "train.adam_betas",
            "must be a valid array such as [0.9, 0.95] (got 0.9)",
        ),
        (
            "method.importance_clip=2",
            "method.importance_clip",
            "must be a valid array such as [0.0, 2.0] (got 2)",
        ),
        (
            "method.importance_mask=5.0",
            "method.importance_mask",
            "must be a valid array such as [0.5, 5.0] (got 5.0)",
        ),
        ("eval.samples=4", "eval.temperature", "greedy answers are all equal"),
        ("eval.temperature=0.0001", "eval.temperature", "must be 0 (greedy), or 0.001 or more"),
        (
            "student={model = 'm', dtype = 'float32', attention = 'flash'}",
            "student.attention",
            "needs dtype = 'bfloat16'",
        ),
        ("student.attention=flex", "student.attention", "expected one of"),
        ("method.dual_clip=0.9", "method.dual_clip", "greater than 1"),
        ("method.clip_low=1.5", "method.clip_low", "less than or equal to 1"),
        ("method.tail=bucket+teacher_samples", "method.tail", "expected one of"),
        ("method.updates_per_step=33", "method", "raise train.prompts_per_step"),
        ("anchor.tau=1.5", "anchor.tau", "less than or equal to 1"),
        ("anchor.period=3", "anchor.period", "did you mean 'update_period'?"),
        ("reward.type=taste", "reward.type", "must be one of exact_match"),
        ("reward.type=reasoning_gym:x", "data", "remove the key"),
        ("anchor={tau = 0.0, update_period = 1}", "anchor", "the anchor equals the student"),
        (
            "environment={retriever = 'c.jsonl', max_passage_tokens = 1024}",
            "environment",
            "lower the first value or raise the second",
        ),
        ("teacher.top_k=3", "teacher.top_k", "only a job with method.type = 'on_policy'"),
    ],
)
def test_refusals(tmp_path: Path, override: str, key: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_rl_job(tmp_path, JOB, override)
    assert f": {key}: " in caught.value.message
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (
            JOB.replace('reward.type = "exact_match"', "method.beta = 0"),
            "reward",
            "needs method.beta",
        ),
        (JOB.replace('data.path = "d.jsonl"\n', ""), "data", "generates its prompts"),
        (
            JOB + 'method.kl_in = "reward"\nmethod.divergence = "forward_kl"\n',
            "method.divergence",
            "needs reverse_kl",
        ),
        (
            JOB.replace('reward.type = "exact_match"', "method.beta = 0\nmethod.teacher_beta = 0")
            + 'teacher.address = "localhost:1"\n',
            "reward",
            "needs method.beta",
        ),
        (
            JOB.replace('reward.type = "exact_match"', 'method.top_k = 0\nmethod.estimator = "k1"')
            + 'teacher.address = "localhost:1"\n',
            "reward",
            "use 'k4'",
        ),
        (
            JOB.replace('reward.type = "exact_match"', "method.beta = 0.5"),
            "reward",
            "the anchor starts equal to the student",
        ),
        (
            JOB + "method.reward_weight = 0\n",
            "reward",
            "give a reward, a teacher, or anchor.context",
        ),
        (
            JOB + 'method.beta = 0\nanchor.context = "{answer}"\n',
            "anchor",
            "needs an anchor",
        ),
        (
            JOB + 'method.divergence = "forward_kl"\nmethod.tail = "bucket+draws"\n',
            "method.tail",
            "the teacher chooses the head",
        ),
        (
            JOB + "method.importance_clip = [0.5, 2.0]\nmethod.importance_mask = [0.5, 5.0]\n",
            "method.importance_mask",
            "remove one of the two keys",
        ),
        (
            JOB.replace('reward.type = "exact_match"', 'teacher.address = "localhost:1"')
            + "method.importance_clip = [0.5, 2.0]\n",
            "method.importance_clip",
            "'bucket+draws' uses no sampled token",
        ),
        (
            JOB + 'method.kl_in = "reward"\nmethod.tail = "none"\n',
            "method.tail",
            "whose baseline is 'bucket+draws' (default) or 'bucket'",
        ),
        (
            JOB + 'method.kl_in = "reward"\nmethod.top_k = 0\nmethod.estimator = "k3"\n',
            "method.estimator",
            "is not used with",
        ),
        (
            JOB + 'method.top_k = 0\nmethod.estimator = "k5"\n',
            "method.estimator",
            "divergence = 'forward_kl'",
        ),
    ],
)
def test_refusals_of_what_does_not_go_together(
    tmp_path: Path, text: str, key: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_rl_job(tmp_path, text)
    assert f": {key}: " in caught.value.message
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.top_k=0", "method.estimator=k1"),  # trains on the reward
        ("method.reward_weight=0", "teacher.address=localhost:1"),
        ("method.reward_weight=0", "anchor.context={answer}"),
        ("anchor.tau=0.0", "anchor.update_period=1", "method.updates_per_step=2"),
        ("environment.retriever=c.jsonl", "environment.max_passage_tokens=1023"),
        ("method.kl_in=reward", "method.tail=bucket"),
        # Resolved jobs from before tail draws have this key, whether or not the loss reads the
        # tail.
        ("method.beta=0", "method.tail=bucket+sampled"),
        ("method.top_k=0", "method.tail=bucket+sampled"),
        ("method.kl_in=reward", "method.tail=bucket+sampled"),
    ],
)
def test_what_is_near_a_refusal_and_learns(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    load_rl_job(tmp_path, JOB, *overrides)


def test_files_are_looked_for_and_servers_are_not(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    text = JOB.replace("d.jsonl", str(tmp_path / "d.jsonl"))
    retriever_override = "environment.retriever=http://127.0.0.1:1/retrieve"
    check_files(load_rl_job(tmp_path, text, retriever_override))
    for override, field in (
        ("environment.retriever=passages.jsonl", "environment.retriever"),
        ("data.path=e.jsonl", "data.path"),
    ):
        with pytest.raises(InvalidInput, match="no such file") as caught:
            check_files(load_rl_job(tmp_path, text, override))
        assert caught.value.field == field
