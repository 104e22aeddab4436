"""PPO's advantages in the whole trainer, from the student's states to the critic's file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clients.config.tables.rl_method import RLConfig
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from protos.errors import Unavailable
from student_trainer.assembly import assemble
from student_trainer.critic import CriticAdvantages
from student_trainer.data.sequence import Rollout
from student_trainer.methods.rl import PendingRLSequence
from student_trainer.rewards import make_rewards
from tests.end_to_end.processes import metrics_of
from tests.student_trainer import tiny
from tests.student_trainer.methods.test_rl import HOT, trainer_of

LAMBDA = 0.9


def advantages_by_recursion(values: Tensor, reward: float) -> Tensor:
    """Return A_t = delta_t + lambda A_(t+1), from the last token to the first."""
    advantage = next_value = 0.0
    advantages = []
    for t in reversed(range(len(values))):
        token_reward = reward if t == len(values) - 1 else 0.0
        advantage = token_reward + next_value - float(values[t]) + LAMBDA * advantage
        next_value = float(values[t])
        advantages.append(advantage)
    return torch.tensor(advantages[::-1], dtype=torch.float64)


def test_advantages_are_those_of_the_recursion(material: tiny.Material, tmp_path: Path) -> None:
    """With values from plain forward passes; the value loss trains the critic, not the student."""
    config = tiny.rl_job(
        material,
        method__advantages="gae",
        method__gae_lambda=LAMBDA,
        method__critic_learning_rate=0.01,
        method__temperature=HOT,
        method__updates_per_step=1,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        values = trainer.method.critic
        assert values is not None
        model = trainer.student.trained.model
        torch.nn.init.normal_(values._critic.linear.weight, std=0.1)
        state_before = {name: tensor.clone() for name, tensor in values.state().items()}
        step = trainer.method.steps(1)
        rewarded = 0
        for item in step.updates[0]:
            rollout = cast(Rollout, item.sequence)
            states = model.get_decoder()(input_ids=rollout.token_ids[None]).last_hidden_state[0]
            weight, bias = state_before["linear.weight"], state_before["linear.bias"]
            expected = (states[rollout.start - 1 : -1].detach() @ weight.T + bias)[:, 0]
            reward = float("1" in tiny.tokenizer().decode(rollout.completion))
            rewarded += reward > 0
            advantage = cast(PendingRLSequence, item).advantage.double()
            torch.testing.assert_close(
                advantage, advantages_by_recursion(expected, reward), rtol=1e-4, atol=1e-5
            )
        assert 0 < rewarded < len(step.updates[0])
        assert not torch.equal(values.state()["linear.weight"], state_before["linear.weight"])
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_resume_goes_on_with_the_same_critic(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(
        material,
        method__advantages="gae",
        method__beta=0.0,
        max_steps=4,
        checkpoint__every=2,
        method__temperature=HOT,
    )
    run = RunDirectory.create(tmp_path / "run", config)
    files_of_attempts: list[Any] = []
    assert config.reward is not None
    for attempt, from_step in ((1, None), (2, 2)):
        progress = Progress(run, attempt=attempt, max_steps=4, main=True, terminated=lambda: False)
        with make_rewards(config.reward) as rewards:
            trainer = assemble(config, run, {}, progress, attempt, from_step, rewards)
            assert trainer.train() == "succeeded"
        checkpoint_path = run.checkpoints / "step-000004"
        files = [checkpoint_path / "critic.safetensors", run.export / "model.safetensors"]
        files_of_attempts.append([load_file(file) for file in files])
    for first, second in zip(*files_of_attempts, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    losses = [line["critic/loss"] for line in metrics_of(run) if line["step"] > 0]
    assert len(set(losses)) == len(losses)


def test_the_state_is_loaded_where_the_fused_kernel_reads_it(student: Any) -> None:
    """The fused AdamW reads the step count on the weight's device, here the meta device."""
    saved = torch.nn.Linear(student.config.hidden_size, 1)
    tensors = {f"linear.{name}": weight.detach() for name, weight in saved.named_parameters()}
    for name, weight in list(tensors.items()):
        tensors |= {f"{name}/exp_avg": weight, f"{name}/exp_avg_sq": weight.square()}
        tensors[f"{name}/step"] = torch.tensor(3.0)
    accelerator: Any = SimpleNamespace(device=torch.device("meta"))
    full: Any = SimpleNamespace(full=SimpleNamespace(model=student))
    critic = CriticAdvantages(accelerator, full, RLConfig(type="rl", advantages="gae"), 64)
    critic.load_state(tensors.__getitem__)
    assert critic.state().keys() == tensors.keys()
    assert {tensor.device.type for tensor in critic.state().values()} == {"meta"}


@pytest.mark.parametrize(
    ("advantages", "place"),
    [
        pytest.param("group", "in the student's step", marks=pytest.mark.slow),
        pytest.param("gae", "before the critic", marks=pytest.mark.slow),
        ("gae", "after the critic"),
        pytest.param("gae", "in the student's step", marks=pytest.mark.slow),
    ],
)
def test_a_fault_after_the_critic_has_learned_leaves_no_checkpoint(
    material: tiny.Material,
    tmp_path: Path,
    advantages: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The critic would be a step ahead of the student. In other cases, a checkpoint is saved."""
    config = tiny.rl_job(material, method__advantages=advantages, checkpoint__every=50)
    with trainer_of(tmp_path / "run", config) as trainer:
        sample, learn = trainer.method.steps, trainer.learner.add_gradients

        def fail_in_step_2() -> None:
            if trainer.step == 1:
                raise Unavailable("no teacher")

        def sample_or_fail(step: int) -> Any:
            if place == "before the critic":
                fail_in_step_2()
            samples = sample(step)
            if place == "after the critic":
                fail_in_step_2()
            return samples

        def learn_or_fail(pending: Any) -> Any:
            if place == "in the student's step":
                fail_in_step_2()
            return learn(pending)

        monkeypatch.setitem(vars(trainer.method), "steps", sample_or_fail)
        monkeypatch.setattr(trainer.learner, "add_gradients", learn_or_fail)
        with pytest.raises(Unavailable):
            trainer.train()
    checkpoint_names = sorted(
        path.name for path in (tmp_path / "run").glob("**/step-*") if path.is_dir()
    )
    is_saved = advantages == "group" or place == "before the critic"
    assert checkpoint_names == (["step-000001"] if is_saved else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_critic_goes_on_where_its_weights_are(material: tiny.Material, tmp_path: Path) -> None:
    """A checkpoint is loaded on the CPU; the critic stays on its device."""
    config = tiny.rl_job(material, method__advantages="gae")
    with trainer_of(tmp_path / "run", config) as trainer:
        values = trainer.method.critic
        assert values is not None
        trainer.method.steps(1)
        cpu_state = {name: tensor.cpu() for name, tensor in values.state().items()}
        values.load_state(cpu_state.__getitem__)
        trainer.method.steps(2)
