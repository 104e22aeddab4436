"""PPO's advantages: a critic on the student's own states, and generalised advantage estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLConfig
from student_trainer.critic.critic import Critic, value_loss
from student_trainer.data.batch import NumberedSequence, make_batch, unread
from student_trainer.data.metric_sums import counted
from student_trainer.data.packing import micro_batches
from student_trainer.data.rollout import Rollout
from student_trainer.losses.advantages import at_the_end, gae
from student_trainer.parallel.sharding import Replicated, Sharded

_CLIP = 0.2  # of the critic's own step, as in PPO's code


class CriticAdvantages:
    """Owns the critic and its optimizer, which are the same in every process.

    The critic bends no weight of the student: it needs the states of a step's answers once (one
    forward pass, and their memory), and learns from them before the student does.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: Replicated | Sharded,
        method: RLConfig,
        tokens_per_micro_batch: int,
    ) -> None:
        self._accelerator = accelerator
        self._student = student
        self._method = method
        self._most = tokens_per_micro_batch
        width = student.whole.model.config.get_text_config().hidden_size
        self._critic = Critic(width).to(accelerator.device)
        self._optimizer = torch.optim.AdamW(
            self._critic.parameters(), lr=method.critic_learning_rate, weight_decay=0.0
        )

    def __call__(self, rollouts: Sequence[Rollout], rewards: Tensor) -> tuple[list[Tensor], Tensor]:
        """([learned] of each answer, (sum, number) of the critic's loss); then the critic learns.

        rewards [S], NaN where there is none: such an answer has no advantage, and teaches nothing.
        Every process must call it, outside `gathered()`.
        """
        states = torch.cat(self._states(rollouts))
        lengths = torch.tensor([one.learned for one in rollouts])
        sequence = torch.arange(len(rollouts)).repeat_interleave(lengths)
        known = rewards.isfinite()[sequence]
        with torch.no_grad():
            values = self._critic(states)
        of_tokens = at_the_end(rewards.nan_to_num().float(), lengths)
        device = states.device
        found, targets = gae(
            of_tokens.to(device),
            values,
            sequence.to(device),
            gamma=1.0,
            lam=self._method.gae_lambda,
        )
        known = known.to(device)
        loss = self._learn(states[known], values[known], targets[known])
        advantages = torch.where(known, found, 0.0).cpu()
        return list(torch.split(advantages, lengths.tolist())), loss

    def _learn(self, states: Tensor, values: Tensor, targets: Tensor) -> Tensor:
        """As many steps as the student makes; (sum, number) of the loss before them."""
        measured = torch.zeros(2, dtype=torch.float64)
        count = self._over_processes(torch.tensor([float(len(states))], device=states.device))
        for update in range(self._method.updates_per_step):
            losses = value_loss(self._critic(states), values, targets, clip=_CLIP)
            if update == 0:
                measured = counted(losses.detach())
            self._accelerator.backward(losses.sum() / count.clamp(min=1)[0])
            for parameter in self._critic.parameters():
                assert parameter.grad is not None, "it is of every state, if of none"
                parameter.grad = self._over_processes(parameter.grad)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return measured

    def _over_processes(self, values: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(values)
        return total

    @torch.no_grad()
    def _states(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """[learned, H] of each, float32, as the head reads them."""
        read = [
            NumberedSequence(one, unread(np.zeros((one.learned, 0), np.int32)), number)
            for number, one in enumerate(rollouts)
        ]
        found: dict[int, Tensor] = {}
        whole = self._student.whole
        with self._student.gathered():
            whole.eval()
            for group in micro_batches(read, self._most, pack=whole.packs):
                batch = make_batch(group, self._student.device, pack=whole.packs)
                lengths = [item.sequence.learned for item in group]
                parts = torch.split(whole.states(batch).float(), lengths)
                found |= {item.number: part for item, part in zip(group, parts, strict=True)}
        return [found[number] for number in range(len(rollouts))]

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, by name."""
        moments = {
            f"{name}/{kind}": value
            for name, parameter in self._critic.named_parameters()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {**self._critic.state_dict(), **moments}

    def load_state(self, tensor: Callable[[str], Tensor]) -> None:
        """From tensors by the names of `state`, after at least one step."""
        with torch.no_grad():
            for name, parameter in self._critic.named_parameters():
                parameter.copy_(tensor(name))
                moments = {k: tensor(f"{name}/{k}") for k in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {
                    "step": tensor(f"{name}/step"),  # AdamW counts its steps on the CPU
                    **{kind: value.to(parameter.device) for kind, value in moments.items()},
                }
