"""Reinforcement learning as a loss of rows: a policy gradient, and a KL to each of some models.

    loss = -clipped(ratio, advantage) + sum over pulls of weight * KL          (kl_in = "loss")

With kl_in = "reward" the KL of each pull is part of the advantage instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from clients.config.rl import RLConfig, RLJob
from protos.rows.codec import RowBlock
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, teacher_rows
from student_trainer.data.metric_sums import counted
from student_trainer.losses import FusedLoss, LossFunction, Rows, sampled_kl, topk_kl
from student_trainer.losses.advantages import kl_reward
from student_trainer.losses.aggregate import token_weights
from student_trainer.losses.policy import (
    clipped_surrogate,
    importance_weights,
    is_clipped,
    sequence_log_ratio,
    token_log_ratio,
)


@dataclass(frozen=True)
class Pull:
    """A model that holds the student back: its name in the metrics, and the weight of its KL."""

    name: str
    weight: float


@dataclass(frozen=True)
class RLSequence(ScoredSequence):
    """`rows` are of the first pull, `others` of the further ones; advantage [] or [learned]; is it
    `kept`, or not learned from?
    """

    others: tuple[RowBlock, ...]
    advantage: Tensor
    kept: bool


@dataclass(frozen=True)
class RLBatch(Batch):
    """others: rows of N, one for each pull but the first; advantages [N]; weights [N]: what each
    token counts.
    """

    others: tuple[Rows, ...]
    advantages: Tensor
    weights: Tensor

    @property
    def sampled(self) -> Tensor:
        """Log-probs [N] of the tokens by the policy that wrote them."""
        assert self.sampling_logprobs is not None, "rollouts have them"
        return self.sampling_logprobs

    def without_rows(self) -> RLBatch:
        none = slice(0, 0)
        return RLBatch(
            **vars(super().without_rows()),
            others=tuple(rows[none] for rows in self.others),
            advantages=self.advantages[none],
            weights=self.weights[none],
        )


@dataclass(frozen=True)
class RLObjective:
    """`pulls`: in the order of every batch's rows; none where only rewards are learned from."""

    method: RLConfig
    pulls: tuple[Pull, ...]
    rewarded: bool

    @classmethod
    def of(cls, job: RLJob) -> RLObjective:
        """A rollout has the teacher's rows before the anchor's."""
        method = job.method
        teacher = [Pull("teacher", method.teacher_beta)] if job.teacher is not None else []
        anchor = [Pull("anchor", method.beta)] if method.beta else []
        rewarded = job.reward is not None and method.reward_weight > 0
        return cls(method, (*teacher, *anchor), rewarded)

    @property
    def temperature(self) -> float:
        return self.method.temperature

    @property
    def of_all_rows(self) -> bool:
        return self._has_policy_gradient and self.method.ratio == "sequence"

    def batch(
        self, scored: Sequence[ScoredSequence], device: torch.device, *, pack: bool
    ) -> RLBatch:
        rollouts = [cast(RLSequence, item) for item in scored]
        lengths = torch.tensor([item.sequence.learned for item in rollouts])
        advantages = [item.advantage.expand(item.sequence.learned) for item in rollouts]
        kept = torch.tensor([item.kept for item in rollouts])
        others = zip(*(item.others for item in rollouts), strict=True)
        return RLBatch(
            **vars(make_batch(scored, device, pack=pack)),
            others=tuple(teacher_rows(blocks, device) for blocks in others),
            advantages=torch.cat(advantages).to(device),
            weights=token_weights(lengths, kept, self.method.aggregate).to(device),
        )

    def loss(self, batch: Batch) -> LossFunction:
        assert isinstance(batch, RLBatch)
        in_head = batch.token_in_head

        def loss(rows: Rows, index: slice) -> Tensor:
            terms = []
            if self._has_policy_gradient:
                terms.append(self._policy_gradient(rows, batch, index))
            if self.method.kl_in == "loss":
                for pull, theirs in zip(self.pulls, _pulled(batch), strict=False):
                    kl = self._kl(rows, theirs[index], in_head[index], batch.sampled[index])
                    terms.append(pull.weight * kl)
            return torch.stack(terms).sum(0) * batch.weights[index]

        return loss

    @torch.no_grad()
    def metrics(self, batch: Batch, out: FusedLoss) -> dict[str, Tensor]:
        """As `batch_metrics`, with the unbiased KL to each pull."""
        assert isinstance(batch, RLBatch)
        rows, everything = out.rows, slice(0, len(batch))
        log_ratio = self._log_ratio(rows, batch, everything)
        advantages = self._advantages(rows, batch, everything)
        clips = {"clip_low": self.method.clip_low, "clip_high": self.method.clip_high}
        found = {
            "ratio/mean": counted(token_log_ratio(rows.token_logprobs, batch.sampled).exp()),
            "ratio/clipped": counted(is_clipped(log_ratio, advantages, **clips).float()),
            "entropy": counted(out.metrics["entropy"]),
            "topk/student_mass": counted(rows.head_logprobs.exp().sum(1)),
        }
        for pull, theirs in zip(self.pulls, _pulled(batch), strict=False):
            kl = topk_kl(
                rows,
                theirs,
                batch.token_in_head,
                direction=self.method.direction,
                tail="bucket+sampled",
                importance=self._importance(rows, batch.sampled),
            )
            found[f"kl/{pull.name}"] = counted(kl)
            found[f"topk/{pull.name}_mass"] = counted(theirs.head_logprobs.exp().sum(1))
        return found

    @property
    def _has_policy_gradient(self) -> bool:
        return self.rewarded or self.method.kl_in == "reward"

    def _advantages(self, rows: Rows, batch: RLBatch, index: slice) -> Tensor:
        """With the pulls, where they are rewards."""
        advantages = batch.advantages[index]
        if self.method.kl_in == "reward":
            for pull, theirs in zip(self.pulls, _pulled(batch), strict=False):
                advantages = advantages + pull.weight * kl_reward(rows, theirs[index])
        return advantages

    def _policy_gradient(self, rows: Rows, batch: RLBatch, index: slice) -> Tensor:
        return clipped_surrogate(
            self._log_ratio(rows, batch, index),
            self._advantages(rows, batch, index),
            clip_low=self.method.clip_low,
            clip_high=self.method.clip_high,
        )

    def _log_ratio(self, rows: Rows, batch: RLBatch, index: slice) -> Tensor:
        if self.method.ratio == "token":
            return token_log_ratio(rows.token_logprobs, batch.sampled[index])
        return sequence_log_ratio(rows.token_logprobs, batch.sampled, batch.sequence)

    def _kl(self, rows: Rows, theirs: Rows, in_head: Tensor, sampled: Tensor) -> Tensor:
        method = self.method
        importance = self._importance(rows, sampled)
        if method.top_k:
            return topk_kl(
                rows,
                theirs,
                in_head,
                direction=method.direction,
                tail=method.tail,
                importance=importance,
            )
        kind = method.estimator or ("k4" if method.direction == "reverse" else "k5")
        kl = sampled_kl(rows.token_logprobs, theirs.token_logprobs, kind)
        return kl if importance is None else importance * kl

    def _importance(self, rows: Rows, sampled: Tensor) -> Tensor | None:
        """The one update of a step is made by the policy that wrote it: its weight is 1."""
        if self.method.updates_per_step == 1:
            return None
        return importance_weights(rows.token_logprobs, sampled, self.method.importance_clip)


def _pulled(batch: RLBatch) -> tuple[Rows, ...]:
    """The rows of each pull; there are some even where nothing pulls."""
    return (batch.teacher, *batch.others)
