"""Held-out evaluation: KL, cross-entropy of stored text, task accuracy and reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.metric_sums import sum_and_count
from student_trainer.data.packing import micro_batches
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.loop.step import Objective
from student_trainer.losses import FusedLoss
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.passes import run_passes
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards.rollout_rewards import RolloutRewards
from student_trainer.rewards.text_match import exact_match
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.teachers.source import PendingRows

# Metrics of held-out tokens; the perplexity is exp of the mean.
_MEASURED = ("eval/kl", "eval/kl_bound", "eval/cross_entropy", "eval/perplexity")
# Metrics that select the best checkpoint; each has a standard error, in this order.
_SELECTING = ("eval/kl", "eval/kl_bound", "eval/cross_entropy", "eval/reward")
_HIGHEST_LOG = 700.0  # exp of it is still finite in float64


class HeldOutObjective(Objective, Protocol):
    """An objective that can be measured on held-out sequences."""

    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return values of each token, [n], by names in _MEASURED."""


@dataclass(frozen=True)
class Samples:
    """Sampled held-out answers in place of greedy ones.

    count: answers per prompt. seed: of the job. Answer n of prompt i has the rollout number
    first - (i * count + n), whatever the number of processes.
    """

    count: int
    seed: int
    first: int


class TaskEvaluation:
    """Scores answers to fixed prompts, greedy or sampled, by exact match and the job's reward."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        accelerator: Accelerator,
        tokenizer: Any,
        rollouts: Rollouts,
        *,
        matched: bool = True,
        judged: RolloutRewards | None = None,
        sampled: Samples | None = None,
    ) -> None:
        """`prompts`: of all processes; this process keeps its share.

        `matched`: whether to compare answers with the references. `judged`: the job's reward, None
        if it has none. `sampled`: None for one greedy answer to each prompt.
        """
        self._prompts = list(enumerate(prompts))[
            accelerator.process_index :: accelerator.num_processes
        ]
        self._sampled = sampled
        self._each = sampled.count if sampled else 1
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._matched = matched
        self._judged = judged

    def __call__(self) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Sample this process's answers; if this process samples, inside `student.gathered()`.

        Returns a tensor [2, 2] float64, (sum, number) of right answers and of finite rewards; the
        `moments` of the rewards; and the transcripts of the first 8 answers.
        """
        asked = [prompt for _, prompt in self._prompts for _ in range(self._each)]
        answers = self._answers(asked)
        right = [exact_match(text, rollout.answer) for rollout, text in answers if self._matched]
        each = self._each
        transcripts = [self._transcript(*pair) for pair in answers[::each][:8]]
        rewards = self._rewards(asked, [rollout for rollout, _ in answers])
        for transcript, reward in zip(transcripts, rewards[::each].tolist(), strict=False):
            transcript["reward"] = reward if math.isfinite(reward) else None
        known = np.isfinite(rewards)
        of_prompt = torch.from_numpy(np.where(known, rewards, 0.0)).reshape(-1, each).sum(1)
        counts = torch.from_numpy(known.astype(np.float64)).reshape(-1, each).sum(1)
        sums = [[sum(right), len(right)], [float(of_prompt.sum()), float(counts.sum())]]
        return torch.tensor(sums, dtype=torch.float64), moments(of_prompt, counts), transcripts

    def _answers(self, asked: Sequence[Prompt]) -> list[tuple[Rollout, str]]:
        """Return the rollouts of the prompts, and their texts."""
        sampled = self._sampled
        if sampled is None:
            return greedy_answers(self._rollouts, self._tokenizer, asked)
        numbers = [
            sampled.first - (index * sampled.count + n)
            for index, _ in self._prompts
            for n in range(sampled.count)
        ]
        batches = self._rollouts.generate(asked, numbers, seed=sampled.seed)
        return [(one, one.answer_text(self._tokenizer)) for batch in batches for one in batch]

    def _rewards(self, asked: Sequence[Prompt], rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        return np.empty(0) if self._judged is None else self._judged(asked, rollouts)

    def _transcript(self, rollout: Rollout, text: str) -> dict[str, Any]:
        prompt = self._tokenizer.decode(rollout.token_ids[: rollout.start])
        found = {"prompt": prompt, "answer": text, "reference": rollout.answer}
        if rollout.own is None:
            return found
        return found | {"talk": self._tokenizer.decode(rollout.completion)}


class Evaluation:
    """Measures held-out sequences and, if the job wants it, the task evaluation."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: HeldOutObjective,
        held_out: Callable[[], list[PendingRows]],
        examination: TaskEvaluation | None,
        *,
        samples: bool,
        tokens_per_micro_batch: int,
    ) -> None:
        """`held_out`: returns this process's held-out sequences.

        They must be the same every time, so that evaluations at different steps are comparable.
        `examination`: the task evaluation, None if the job has none. `samples`: whether one of the
        two samples in this process, which needs all weights.
        """
        self._accelerator = accelerator
        self._objective = objective
        self._held_out = held_out
        self._examination = examination
        self._samples = samples
        self._most = tokens_per_micro_batch

    def __call__(
        self, student: Replicated | Sharded
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Collective. Evaluate `student`, which is left in eval mode.

        Returns the metrics over all processes, and transcripts of a few answers of this process. A
        DistillError of one rank is raised on all ranks.
        """
        sums, spreads, transcripts = self._found(student)
        device = self._accelerator.device
        total = self._accelerator.reduce(sums.to(device)).tolist()
        spread = self._accelerator.reduce(spreads.to(device)).tolist()
        names = [*_MEASURED, "eval/accuracy", "eval/reward"]
        counts = dict(zip(names, total, strict=True))
        metrics = {name: found / count for name, (found, count) in counts.items() if count}
        for name, of_name in zip(_SELECTING, spread, strict=True):
            if of_name[-1] > 1:
                metrics[f"{name}_stderr"] = standard_error(*counts[name], *of_name)
        if "eval/perplexity" in metrics:
            metrics["eval/perplexity"] = math.exp(min(metrics["eval/perplexity"], _HIGHEST_LOG))
        return metrics, transcripts

    def _found(self, student: Replicated | Sharded) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Collective. Return this process's sums, moments and transcripts.

        Sums: (sum, number) of each metric, [len(_MEASURED) + 2, 2]. Moments: of each metric in
        _SELECTING, [4, 4]. Both are float64.
        """
        sums = torch.zeros(len(_MEASURED) + 2, 2, dtype=torch.float64)
        spreads = torch.zeros(len(_SELECTING), 4, dtype=torch.float64)
        transcripts: list[dict[str, Any]] = []
        student.trained.eval()
        student.full.eval()
        with student.gathered() if self._samples else nullcontext():
            held_out = raise_on_all_ranks(self._accelerator, self._held_out)
            if self._examination is not None:
                sums[-2:], spreads[-1], transcripts = raise_on_all_ranks(
                    self._accelerator, self._examination
                )
        sums[:-2], spreads[:-1] = self._measured(student, held_out)
        return sums, spreads, transcripts

    def _measured(
        self, student: Replicated | Sharded, held_out: Sequence[PendingRows]
    ) -> tuple[Tensor, Tensor]:
        """Collective. Return the sums of _MEASURED and the moments of _SELECTING; see `_found`."""
        sums = torch.zeros(len(_MEASURED), 2, dtype=torch.float64)
        spreads = torch.zeros(len(_SELECTING) - 1, 4, dtype=torch.float64)
        objective, layout = self._objective, student.trained.layout
        groups = raise_on_all_ranks(
            self._accelerator,
            lambda: [
                [item.wait() for item in group]
                for group in micro_batches(held_out, self._most, layout)
            ],
        )

        def batch_of(scored: Sequence[ScoredSequence]) -> Batch:
            return objective.batch(scored, student.device, layout)

        def values_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            settings = objective.loss(batch), objective.temperature, objective.needs_all_rows
            found = objective.held_out(batch, student.forward(batch, *settings))
            return batch.sequence.cpu(), {name: of.cpu() for name, of in found.items()}

        measured = run_passes(student, groups, batch_of, values_of)
        for group, (sequence, found) in zip(groups, measured, strict=True):
            for name, values in found.items():
                sums[_MEASURED.index(name)] += sum_and_count(values).double()
                if name in _SELECTING:
                    of_sequence = torch.zeros(2, len(group), dtype=torch.float64)
                    of_sequence[0].index_add_(0, sequence, values.double())
                    ones = torch.ones_like(values, dtype=torch.float64)
                    of_sequence[1].index_add_(0, sequence, ones)
                    spreads[_SELECTING.index(name)] += moments(*of_sequence)
        return sums, spreads


def moments(sums: Tensor, counts: Tensor) -> Tensor:
    """Return [4] float64: sum of x^2, of x n, of n^2, and the number of sequences with n > 0.

    `sums` [S]: x, the sum over one sequence. `counts` [S]: n, how much it was summed over.
    """
    sequences = (counts > 0).sum().to(sums.dtype)
    return torch.stack([sums @ sums, sums @ counts, counts @ counts, sequences])


def standard_error(
    total: float, count: float, xx: float, xn: float, nn: float, sequences: float
) -> float:
    """Return the standard error of the mean total / count over sequences drawn independently.

    The tokens of a sequence are not independent, so the sequence is the unit: the error is that of
    a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4), with S / (S - 1) for the
    variance of S sequences. `xx` to `sequences`: as `moments` returns them; at least 2 sequences.
    """
    mean = total / count
    squares = max(xx - 2 * mean * xn + mean**2 * nn, 0.0)
    return math.sqrt(sequences / (sequences - 1) * squares) / count


def greedy_answers(
    rollouts: Rollouts, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[tuple[Rollout, str]]:
    """Return the greedy rollout of each prompt (the most likely token each time) and its text."""
    batches = rollouts.generate(prompts, [0] * len(prompts), seed=0, greedy=True)
    return [(rollout, rollout.answer_text(tokenizer)) for batch in batches for rollout in batch]
