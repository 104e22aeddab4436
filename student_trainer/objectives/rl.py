"""The objective of reinforcement learning: a clipped policy gradient and a KL to other models.

    loss = -rho clipped(ratio, advantage) + sum over KL terms of weight * KL   (kl_in = "loss")

- p: the student.
- p_old: the student before the first update of the step.
- mu: the policy that sampled the token.
- ratio: p/p_old.
- rho: the weight p_old/mu.

The sampled part of a KL has the weight p/mu. With kl_in = "reward", each KL term is part of the
advantage instead (`kl_reward`). Sources: EMA-PG (arXiv 2602.04417), GRPO (arXiv 2402.03300),
decoupled PPO (arXiv 2110.00641).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from clients.config.rl import RLJob
from clients.config.tables.rl_method import RLConfig
from protos.rows.codec import RowBlock
from student_trainer.data.batch import (
    Batch,
    ScoredSequence,
    copy_to_device,
    make_batch,
    sum_and_count,
    teacher_rows,
)
from student_trainer.data.packing import Layout
from student_trainer.losses import (
    FusedLoss,
    Index,
    LossFunction,
    Rows,
    importance_weights,
    mismatch,
    sampled_kl,
    topk_kl,
)
from student_trainer.losses.advantages import kl_reward
from student_trainer.losses.aggregate import token_weights
from student_trainer.losses.policy import (
    clipped_surrogate,
    is_clipped,
    sequence_log_ratio,
    token_log_ratio,
)
from student_trainer.objectives.distillation import gradient_noise


@dataclass(frozen=True)
class KLTerm:
    """The KL from the student to another model.

    - name: the name of the model in metrics.
    - weight: the factor of the KL in the loss.
    """

    name: str
    weight: float


@dataclass(frozen=True)
class RLSequence(ScoredSequence):
    """A rollout with its rows and its advantage.

    - rows: the rows of the first KL term.
    - other_rows: the rows of the other KL terms, in order.
    - advantage: a scalar for the full answer, or one value per learned token, [learned].
    - is_included: False if the loss excludes the answer.
    - old_logprobs [learned]: log-probs of the tokens under p_old, in nats; None in the first update
      of a step, where p_old is the student itself.
    """

    other_rows: tuple[RowBlock, ...]
    advantage: Tensor
    is_included: bool
    old_logprobs: Tensor | None = None


@dataclass(frozen=True)
class RLBatch(Batch):
    """A batch of rollouts with advantages.

    - other_rows: N rows for each KL term except the first.
    - advantages [N]: the advantage of each token.
    - weights [N]: the weight of each token in the sum of the loss.
    - old_logprobs [N] or None: see RLSequence.
    """

    other_rows: tuple[Rows, ...]
    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None

    @property
    def sampler_logprobs(self) -> Tensor:
        """Log-probs [N] of the tokens under the policy that sampled them, in nats."""
        assert self.sampling_logprobs is not None, "rollouts have sampling log-probs"
        return self.sampling_logprobs

    def without_rows(self) -> RLBatch:
        """Return a batch with one input token and no rows; see `Batch.without_rows`."""
        no_rows = slice(0, 0)
        return RLBatch(
            **vars(super().without_rows()),
            other_rows=tuple(rows[no_rows] for rows in self.other_rows),
            advantages=self.advantages[no_rows],
            weights=self.weights[no_rows],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[no_rows],
        )


@dataclass(frozen=True)
class RLObjective:
    """Minimises the loss of an RL job; see the module docstring.

    - method: the settings of the method.
    - kl_terms: in the order of the rows of every batch; empty if the student learns from rewards
      alone.
    - has_reward: whether the student learns from rewards.
    """

    method: RLConfig
    kl_terms: tuple[KLTerm, ...]
    has_reward: bool

    @classmethod
    def of(cls, job: RLJob) -> RLObjective:
        """Return the objective of a job. The teacher's KL term, if any, precedes the anchor's."""
        method = job.method
        teacher = [KLTerm("teacher", method.teacher_beta)] if job.teacher is not None else []
        anchor = [KLTerm("anchor", method.beta)] if method.beta else []
        has_reward = job.reward is not None and method.reward_weight > 0
        return cls(method, (*teacher, *anchor), has_reward)

    @property
    def temperature(self) -> float:
        """Temperature of the student's distribution: the student's logits are divided by it."""
        return self.method.temperature

    @property
    def needs_all_rows(self) -> bool:
        """True if the loss has sequence ratios (GSPO), which need all rows of a batch at once."""
        return self.has_policy_gradient and self.method.ratio == "sequence"

    def batch(
        self, scored_sequences: Sequence[ScoredSequence], device: torch.device, layout: Layout
    ) -> RLBatch:
        """Make the tensors of one micro-batch of RLSequence objects; see `make_batch`."""
        rollouts = [cast(RLSequence, item) for item in scored_sequences]
        lengths = torch.tensor([item.sequence.learned for item in rollouts])
        advantages = [item.advantage.expand(item.sequence.learned) for item in rollouts]
        included = torch.tensor([item.is_included for item in rollouts])
        other_rows = zip(*(item.other_rows for item in rollouts), strict=True)
        old_logprobs = [item.old_logprobs for item in rollouts if item.old_logprobs is not None]
        assert len(old_logprobs) in (0, len(rollouts)), (
            "all rollouts of an update have them, or none"
        )
        return RLBatch(
            **vars(make_batch(scored_sequences, device, layout)),
            other_rows=tuple(teacher_rows(blocks, device) for blocks in other_rows),
            advantages=copy_to_device(torch.cat(advantages), device),
            weights=copy_to_device(token_weights(lengths, included, self.method.aggregate), device),
            old_logprobs=copy_to_device(torch.cat(old_logprobs), device) if old_logprobs else None,
        )

    def loss(self, batch: Batch) -> LossFunction:
        """Return the loss of an RLBatch, as a function of rows: one weighted term per token.

        Each term is multiplied by the weight of its token. The trainer divides the sum of the terms
        by the sum of the weights of all processes.
        """
        assert isinstance(batch, RLBatch)
        in_head = batch.token_in_head

        def loss(rows: Rows, index: Index) -> Tensor:
            terms = []
            if self.has_policy_gradient:
                terms.append(self._compute_policy_gradient(rows, batch, index))
            if self.method.kl_in == "loss":
                for term, model_rows in zip(self.kl_terms, _list_term_rows(batch), strict=False):
                    kl = self._compute_kl(rows, model_rows[index], in_head[index], batch, index)
                    terms.append(term.weight * kl)
            return torch.stack(terms).sum(0) * batch.weights[index]

        return loss

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """Return (sum, number) of each metric. The names are the same for all batches. No gradient.

        kl/NAME, for each KL term: an estimate of the KL in nats. For every tail mode of the loss,
        it is computed with `bucket+draws`, or with `bucket+sampled` if there are no draws. The
        estimate is unbiased if neither `method.importance_clip` nor `method.importance_mask`
        changes its weights.
        """
        assert isinstance(batch, RLBatch)
        rows, all_rows = out.rows, slice(0, len(batch))
        log_ratio = self._compute_log_ratio(rows, batch, all_rows)
        advantages = self._compute_advantages(rows, batch, all_rows)
        importance = self._importance_weights(rows.token_logprobs, batch.sampler_logprobs)
        # Measure the bounded weights of the policy gradient; without policy gradient, of the KL.
        weighted_logprobs = (
            _old_logprobs(rows, batch, all_rows)
            if self.has_policy_gradient
            else rows.token_logprobs
        )
        is_bounded = importance_weights(
            weighted_logprobs, batch.sampler_logprobs
        ) != self._importance_weights(weighted_logprobs, batch.sampler_logprobs)
        clipped = is_clipped(log_ratio, advantages, **self._clips)
        metrics = {
            **mismatch(rows.token_logprobs, batch.sampler_logprobs),
            "ratio/bounded": sum_and_count(is_bounded.float()),
            "ratio/clipped": sum_and_count(clipped.float()),
            "entropy": sum_and_count(out.metrics["entropy"]),
            "topk/student_mass": sum_and_count(rows.head_logprobs.exp().sum(1)),
        }
        for term, model_rows in zip(self.kl_terms, _list_term_rows(batch), strict=False):
            kl = topk_kl(
                rows,
                model_rows,
                batch.token_in_head,
                direction=self.method.direction,
                tail="bucket+sampled" if batch.draw_logprobs is None else "bucket+draws",
                importance=importance,
                draw_logprobs=batch.draw_logprobs,
            )
            metrics[f"kl/{term.name}"] = sum_and_count(kl)
            metrics[f"topk/{term.name}_mass"] = sum_and_count(model_rows.head_logprobs.exp().sum(1))
            if self.method.kl_in == "loss":
                metrics[f"topk/{term.name}_gradient_sd"] = gradient_noise(
                    batch, rows, model_rows, kl
                )
        return metrics

    @property
    def has_policy_gradient(self) -> bool:
        """True if the loss has a policy gradient. Its ratio needs the log-probs under p_old."""
        return self.has_reward or self.method.kl_in == "reward"

    def _compute_advantages(self, rows: Rows, batch: RLBatch, index: Index) -> Tensor:
        """Return the advantages [n]. With kl_in = "reward", they include the KL terms."""
        advantages = batch.advantages[index]
        draws = None if batch.draw_logprobs is None else batch.draw_logprobs[index]
        if self.method.kl_in == "reward":
            for term, model_rows in zip(self.kl_terms, _list_term_rows(batch), strict=False):
                kl = kl_reward(rows, model_rows[index], draws)
                advantages = advantages + term.weight * kl
        return advantages

    @property
    def _clips(self) -> dict[str, float]:
        method = self.method
        dual_clip = math.inf if method.dual_clip is None else method.dual_clip
        return {"clip_low": method.clip_low, "clip_high": method.clip_high, "dual_clip": dual_clip}

    def _compute_policy_gradient(self, rows: Rows, batch: RLBatch, index: Index) -> Tensor:
        old_logprobs = _old_logprobs(rows, batch, index)
        surrogate = clipped_surrogate(
            self._compute_log_ratio(rows, batch, index),
            self._compute_advantages(rows, batch, index),
            **self._clips,
        )
        return self._importance_weights(old_logprobs, batch.sampler_logprobs[index]) * surrogate

    def _compute_log_ratio(self, rows: Rows, batch: RLBatch, index: Index) -> Tensor:
        old_logprobs = _old_logprobs(rows, batch, index)
        if self.method.ratio == "token":
            return token_log_ratio(rows.token_logprobs, old_logprobs)
        return sequence_log_ratio(rows.token_logprobs, old_logprobs, batch.sequence)

    def _compute_kl(
        self, rows: Rows, model_rows: Rows, in_head: Tensor, batch: RLBatch, index: Index
    ) -> Tensor:
        method, draws = self.method, batch.draw_logprobs
        importance = self._importance_weights(rows.token_logprobs, batch.sampler_logprobs[index])
        if method.top_k:
            return topk_kl(
                rows,
                model_rows,
                in_head,
                direction=method.direction,
                tail=method.tail_mode,
                importance=importance,
                draw_logprobs=None if draws is None else draws[index],
            )
        kind = method.estimator or ("k4" if method.direction == "reverse" else "k5")
        kl = sampled_kl(rows.token_logprobs, model_rows.token_logprobs, kind)
        return importance * kl

    def _importance_weights(self, token_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
        """Return the importance weights [n] of tokens, limited by the bounds of the job."""
        method = self.method
        return importance_weights(
            token_logprobs,
            sampler_logprobs,
            clip=method.importance_clip,
            mask=method.importance_mask,
        )


def _old_logprobs(rows: Rows, batch: RLBatch, index: Index) -> Tensor:
    """Return log p_old of the tokens, [n].

    In the first update of a step, these are the detached log-probs of `rows`.
    """
    return rows.token_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[index]


def _list_term_rows(batch: RLBatch) -> tuple[Rows, ...]:
    """Return the rows of each KL term, in order; placeholder rows if there is no term."""
    return (batch.teacher, *batch.other_rows)
