"""The critic of PPO: predicts the value of each token of an answer, and computes advantages.

The value of a token is the reward that the critic expects from this token on. The critic reads the
hidden states that are the input of the student's head, so it needs no second model. The states are
detached: the critic does not train the student, and its loss needs no weight relative to the policy
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from clients.config.tables.rl_method import RLConfig
from student_trainer.data.batch import copy_to_device, sum_and_count
from student_trainer.data.sequence import Rollout
from student_trainer.losses.advantages import gae, reward_at_last_token
from student_trainer.parallel.passes import run_passes_over_rollouts
from student_trainer.parallel.sharding import Replicated, Sharded


class Critic(nn.Module):
    """The critic's network: one float32 linear layer, initialised to zero.

    All values are 0 at first. The advantages (GAE) are then the reward, discounted by gamma * lam
    per token.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [N] of N tokens.

        `hidden` [N, H]: for each token, the hidden state from which the student predicts the token.
        """
        values: Tensor = self.linear(hidden.detach().to(self.linear.weight.dtype))
        return values.squeeze(1)


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float) -> Tensor:
    """Return the clipped value loss of each token, [N].

    The loss is max((V - R)^2, (V_clipped - R)^2) / 2:

    - V: `values` [N], the predictions of the critic.
    - R: `targets` [N], from `gae`.
    - V_clipped: V, limited to the range from `old_values - clip` to `old_values + clip`.
    - `old_values` [N]: the values from which the advantages were computed.

    The gradient is zero for a value that has moved by more than `clip` towards its target. The
    paper of PPO (arXiv 1707.06347) does not clip values; its published code does.
    """
    old_values, targets = old_values.detach(), targets.detach()
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - targets).square(), (clipped_values - targets).square()) / 2


_CLIP = 0.2  # the clip range of the value loss, as in PPO's code


class CriticAdvantages:
    """Computes advantages with a critic, and trains the critic.

    Every process has the same critic and the same state of its optimizer. In each step, the critic
    is trained before the student, and does not change the student. The training needs the hidden
    states of all answers of the step: one forward pass, and float32 [tokens, H] of memory.

    updates: the number of updates of the critic in this process.
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
        self._tokens_per_micro_batch = tokens_per_micro_batch
        width = student.full.model.config.get_text_config().hidden_size
        self._critic = Critic(width).to(accelerator.device)
        self._optimizer = torch.optim.AdamW(
            self._critic.parameters(),
            lr=method.critic_learning_rate,
            weight_decay=0.0,
            fused=True,
        )
        self.updates = 0

    def __call__(self, rollouts: Sequence[Rollout], rewards: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the advantages of a step's answers, and then train the critic on the
        answers.

        `rewards` [S]: the reward of each rollout, NaN for a rollout without reward. A rollout
        without reward gets zero advantages, and the critic does not learn from it.

        Returns two values, on the CPU: the advantages as one tensor [learned] per rollout, and the
        sum and number of the critic's loss before its updates. The advantages are GAE with gamma 1
        (`losses/advantages.py`). Call it outside `gathered()`.
        """
        states = torch.cat(self._compute_states(rollouts))
        lengths = torch.tensor([rollout.learned for rollout in rollouts])
        sequence = torch.arange(len(rollouts)).repeat_interleave(lengths)
        has_reward = rewards.isfinite()[sequence]
        with torch.no_grad():
            values = self._critic(states)
        token_rewards = reward_at_last_token(rewards.nan_to_num().float(), lengths)
        device = states.device
        raw_advantages, targets = gae(
            copy_to_device(token_rewards, device),
            values,
            copy_to_device(sequence, device),
            gamma=1.0,
            lam=self._method.gae_lambda,
        )
        # Row numbers from the host: a mask on the device would make the host wait for their number.
        rows = copy_to_device(has_reward.nonzero().squeeze(1), device)
        loss = self._train(states[rows], values[rows], targets[rows])
        has_reward = copy_to_device(has_reward, device)
        advantages = torch.where(has_reward, raw_advantages, 0.0).cpu()
        return list(torch.split(advantages, lengths.tolist())), loss.cpu()

    def _train(self, states: Tensor, values: Tensor, targets: Tensor) -> Tensor:
        """Collective. Train the critic with as many updates as the student has in a step.

        Returns (sum, number) of the loss before the updates, over the tokens of this process.
        """
        initial_loss = torch.zeros(2, dtype=torch.float64)
        count = self._sum_over_processes(states.new_full((1,), len(states)))
        for update in range(self._method.total_updates):
            losses = value_loss(self._critic(states), values, targets, clip=_CLIP)
            if update == 0:
                initial_loss = sum_and_count(losses.detach())
            self._accelerator.backward(losses.sum() / count.clamp(min=1)[0])
            for parameter in self._critic.parameters():
                assert parameter.grad is not None, (
                    "the loss depends on every parameter, even without states"
                )
                parameter.grad = self._sum_over_processes(parameter.grad)
            self.updates += 1
            self._optimizer.step()
            self._optimizer.zero_grad()
        return initial_loss

    def _sum_over_processes(self, values: Tensor) -> Tensor:
        """Collective. Return the elementwise sum of `values` over all processes."""
        total: Tensor = self._accelerator.reduce(values)
        return total

    def _compute_states(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Collective. Return the head's input states [learned, H] float32 of each rollout."""
        student = self._student
        student.trained.eval()
        return run_passes_over_rollouts(
            student,
            rollouts,
            lambda batch: student.states(batch).float(),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the weights and the AdamW moments of the critic by name, for a checkpoint."""
        moments = {
            f"{name}/{kind}": value
            for name, parameter in self._critic.named_parameters()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {**self._critic.state_dict(), **moments}

    def load_state(self, read_tensor: Callable[[str], Tensor]) -> None:
        """Load the weights and the AdamW moments of the critic from a checkpoint.

        `read_tensor`: returns the stored tensor with a name of `state`. The checkpoint must be
        later than the critic's first update, because AdamW has no moments before it.
        """
        with torch.no_grad():
            for name, parameter in self._critic.named_parameters():
                parameter.copy_(read_tensor(name))
                # The fused kernel reads the step count on the device of the weight.
                self._optimizer.state[parameter] = {
                    kind: read_tensor(f"{name}/{kind}").to(parameter.device)
                    for kind in ("step", "exp_avg", "exp_avg_sq")
                }
