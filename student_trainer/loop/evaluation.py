"""The evaluation on held-out data: KL, cross-entropy of stored text, task accuracy and reward."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from clients.runs.directory import replace_file
from clients.runs.fence import require_unfenced
from student_trainer.data.batch import Batch, ScoredSequence, sum_and_count
from student_trainer.data.packing import micro_batches
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout, TokenSequence
from student_trainer.loop.step import Objective
from student_trainer.losses import FusedLoss
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.passes import run_passes
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards.rollout_rewards import RolloutRewards
from student_trainer.rewards.sample import exact_match
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.teachers.source import PendingRows

# Metrics of held-out tokens; the perplexity is exp of the mean.
_HELD_OUT_METRICS = ("eval/kl", "eval/kl_bound", "eval/cross_entropy", "eval/perplexity")
# Metrics that select the best checkpoint; each has a standard error, in this order.
_SELECTION_METRICS = ("eval/kl", "eval/kl_bound", "eval/cross_entropy", "eval/reward")
# The held-out sequences and their tokens whose log-probs are written.
_WRITTEN_SEQUENCES, _WRITTEN_TOKENS = 4, 512
# The characters at the end of their prompts that are written.
_PROMPT_CHARS = 4000
_MAX_LOG = 700.0  # exp of this value is still finite in float64


class HeldOutObjective(Objective, Protocol):
    """An objective that can be measured on held-out sequences."""

    def held_out(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the values [n] of the tokens of a batch, by the name of the metric.

        The names are in _HELD_OUT_METRICS.
        """

    def token_logprobs(self, batch: Batch, out: FusedLoss) -> Mapping[str, Tensor]:
        """Return the log-probs [n] of the tokens of a batch, in nats, by the names "student" and
        "teacher".

        Without a teacher, only "student" is returned. If the teacher has another tokenizer, the
        result is empty.
        """


@dataclass(frozen=True)
class Samples:
    """The settings of sampled answers to held-out prompts. Without them, the answers are greedy.

    - count: the number of answers per prompt.
    - seed: the seed of the job.
    - first: the number of the first rollout. Answer n of prompt i is rollout number first - (i *
      count + n). The numbers are therefore the same for any number of processes.
    """

    count: int
    seed: int
    first: int


class TaskEvaluation:
    """Samples answers to fixed prompts, and scores them by exact match and by the job's reward.

    The answers are greedy or sampled.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        accelerator: Accelerator,
        tokenizer: Any,
        rollouts: Rollouts,
        *,
        use_exact_match: bool = True,
        rollout_rewards: RolloutRewards | None = None,
        samples: Samples | None = None,
    ) -> None:
        """Select the prompts of this process, and store the settings.

        - prompts: the prompts of all processes.
        - use_exact_match: whether to compare the answers with the reference answers.
        - rollout_rewards: computes the rewards; None if the job has no reward.
        - samples: the settings of sampled answers; None: one greedy answer per prompt.
        """
        self._prompts = list(enumerate(prompts))[
            accelerator.process_index :: accelerator.num_processes
        ]
        self._sample_settings = samples
        self._samples_per_prompt = samples.count if samples else 1
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._use_exact_match = use_exact_match
        self._rollout_rewards = rollout_rewards

    def __call__(self) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Sample and score the answers to this process's prompts.

        Returns three values:

        - a float64 tensor [2, 2]: (number of right answers, number of compared answers), and (sum,
          number) of the finite rewards
        - the moments of the rewards, see `compute_moments`
        - the transcripts of the first answer to each of the first 8 prompts

        If this process samples the answers itself, call this object inside `student.gathered()`.
        """
        prompts = [prompt for _, prompt in self._prompts for _ in range(self._samples_per_prompt)]
        answers = self._sample_answers(prompts)
        right = [
            exact_match(text, rollout.answer) for rollout, text in answers if self._use_exact_match
        ]
        count = self._samples_per_prompt
        transcripts = [self._build_transcript(*pair) for pair in answers[::count][:8]]
        rewards = self._compute_rewards(prompts, [rollout for rollout, _ in answers])
        for transcript, reward in zip(transcripts, rewards[::count].tolist(), strict=False):
            transcript["reward"] = reward if math.isfinite(reward) else None
        has_reward = np.isfinite(rewards)
        prompt_sums = torch.from_numpy(np.where(has_reward, rewards, 0.0)).reshape(-1, count).sum(1)
        counts = torch.from_numpy(has_reward.astype(np.float64)).reshape(-1, count).sum(1)
        sums = [[sum(right), len(right)], [float(prompt_sums.sum()), float(counts.sum())]]
        return (
            torch.tensor(sums, dtype=torch.float64),
            compute_moments(prompt_sums, counts),
            transcripts,
        )

    def _sample_answers(self, prompts: Sequence[Prompt]) -> list[tuple[Rollout, str]]:
        """Return (rollout, text of the answer) for each of `prompts`."""
        settings = self._sample_settings
        if settings is None:
            return greedy_answers(self._rollouts, self._tokenizer, prompts)
        numbers = [
            settings.first - (index * settings.count + n)
            for index, _ in self._prompts
            for n in range(settings.count)
        ]
        batches = self._rollouts.generate(prompts, numbers, seed=settings.seed)
        return [
            (rollout, rollout.answer_text(self._tokenizer))
            for batch in batches
            for rollout in batch
        ]

    def _compute_rewards(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> NDArray[np.float64]:
        return (
            np.empty(0)
            if self._rollout_rewards is None
            else self._rollout_rewards(prompts, rollouts)
        )

    def _build_transcript(self, rollout: Rollout, text: str) -> dict[str, Any]:
        prompt = self._tokenizer.decode(rollout.token_ids[: rollout.start])
        transcript = {"prompt": prompt, "answer": text, "reference": rollout.answer}
        if rollout.own is None:
            return transcript
        return transcript | {"talk": self._tokenizer.decode(rollout.completion)}


class Evaluation:
    """The evaluation of a job: measures the student on held-out sequences and, for a job with a
    task evaluation, on the task.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: HeldOutObjective,
        held_out: Callable[[], list[PendingRows]],
        task_evaluation: TaskEvaluation | None,
        *,
        tokenizer: Any,
        samples: bool,
        tokens_per_micro_batch: int,
    ) -> None:
        """Store the parts of the evaluation.

        - held_out: returns this process's held-out sequences. They must be the same in each call,
          so that evaluations at different steps are comparable.
        - task_evaluation: None if the job has no task evaluation.
        - samples: whether `held_out` or `task_evaluation` samples in this process. Sampling needs
          the full weights.
        """
        self._accelerator = accelerator
        self._objective = objective
        self._held_out = held_out
        self._task_evaluation = task_evaluation
        self._tokenizer = tokenizer
        self._samples = samples
        self._tokens_per_micro_batch = tokens_per_micro_batch

    def __call__(
        self, student: Replicated | Sharded
    ) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
        """Collective. Evaluate the student. Leaves the student in evaluation mode.

        Returns the metrics over all processes, and two lists of this process: the transcripts of a
        few answers, and the records (`_describe_tokens`) of a few held-out sequences. If one rank
        raises a DistillError, the error is raised on all ranks.
        """
        sums, spreads, transcripts, tokens = self._measure(student)
        device = self._accelerator.device
        total = self._accelerator.reduce(sums.to(device)).tolist()
        spread = self._accelerator.reduce(spreads.to(device)).tolist()
        names = [*_HELD_OUT_METRICS, "eval/accuracy", "eval/reward"]
        counts = dict(zip(names, total, strict=True))
        metrics = {
            name: metric_sum / count for name, (metric_sum, count) in counts.items() if count
        }
        for name, name_moments in zip(_SELECTION_METRICS, spread, strict=True):
            if name_moments[-1] > 1:
                metrics[f"{name}_stderr"] = standard_error(*counts[name], *name_moments)
        if "eval/perplexity" in metrics:
            metrics["eval/perplexity"] = math.exp(min(metrics["eval/perplexity"], _MAX_LOG))
        return metrics, transcripts, tokens

    def _measure(
        self, student: Replicated | Sharded
    ) -> tuple[Tensor, Tensor, list[dict[str, Any]], list[dict[str, Any]]]:
        """Collective. Return four values of this process:

        - float64 [len(_HELD_OUT_METRICS) + 2, 2]: (sum, number) of each metric
        - float64 [4, 4]: the moments of each metric in _SELECTION_METRICS
        - the transcripts of a few answers
        - the records of the tokens of a few held-out sequences
        """
        sums = torch.zeros(len(_HELD_OUT_METRICS) + 2, 2, dtype=torch.float64)
        spreads = torch.zeros(len(_SELECTION_METRICS), 4, dtype=torch.float64)
        transcripts: list[dict[str, Any]] = []
        student.trained.eval()
        student.full.eval()
        with student.gathered() if self._samples else nullcontext():
            held_out = raise_on_all_ranks(self._accelerator, self._held_out)
            if self._task_evaluation is not None:
                sums[-2:], spreads[-1], transcripts = raise_on_all_ranks(
                    self._accelerator, self._task_evaluation
                )
        sums[:-2], spreads[:-1], tokens = self._measure_held_out(student, held_out)
        return sums, spreads, transcripts, tokens

    def _measure_held_out(
        self, student: Replicated | Sharded, held_out: Sequence[PendingRows]
    ) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Collective. Return the sums, the moments and the token records of the held-out sequences.

        See `_measure` for the values. The values of the task evaluation are not included.
        """
        tokens: list[dict[str, Any]] = []
        sums = torch.zeros(len(_HELD_OUT_METRICS), 2, dtype=torch.float64)
        spreads = torch.zeros(len(_SELECTION_METRICS) - 1, 4, dtype=torch.float64)
        objective, layout = self._objective, student.trained.layout
        groups = raise_on_all_ranks(
            self._accelerator,
            lambda: [
                [item.wait() for item in group]
                for group in micro_batches(held_out, self._tokens_per_micro_batch, layout)
            ],
        )

        def batch_of(scored_sequences: Sequence[ScoredSequence]) -> Batch:
            return objective.batch(scored_sequences, student.device, layout)

        def values_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            settings = objective.loss(batch), objective.temperature, objective.needs_all_rows
            out = student.forward(batch, *settings)
            values = objective.held_out(batch, out), objective.token_logprobs(batch, out)
            metrics, logprobs = (
                {name: of_tokens.cpu() for name, of_tokens in by_name.items()} for by_name in values
            )
            return batch.sequence.cpu(), metrics, logprobs

        results = run_passes(student, groups, batch_of, values_of)
        for group, (sequence, token_values, logprobs) in zip(groups, results, strict=True):
            count = _WRITTEN_SEQUENCES - len(tokens) if logprobs else 0
            for number, item in enumerate(group[:count]):
                own_logprobs = {
                    name: values[sequence == number] for name, values in logprobs.items()
                }
                tokens.append(self._describe_tokens(item.sequence, own_logprobs))
            for name, values in token_values.items():
                sums[_HELD_OUT_METRICS.index(name)] += sum_and_count(values).double()
                if name in _SELECTION_METRICS:
                    sequence_sums = torch.zeros(2, len(group), dtype=torch.float64)
                    sequence_sums[0].index_add_(0, sequence, values.double())
                    ones = torch.ones_like(values, dtype=torch.float64)
                    sequence_sums[1].index_add_(0, sequence, ones)
                    spreads[_SELECTION_METRICS.index(name)] += compute_moments(*sequence_sums)
        return sums, spreads, tokens

    def _describe_tokens(
        self, sequence: TokenSequence, logprobs: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the log-probs of the learned tokens of a sequence as a JSON record.

        - prompt: the end of the text before the completion.
        - tokens: the texts of the first 512 learned tokens.
        - student: the student's log-probs of these tokens, in nats.
        - teacher: the teacher's log-probs of these tokens, in nats; only with a teacher.

        A log-prob that is not finite is None, because JSON has no such numbers. A teacher gives
        -inf to a token that it excludes.
        """
        ids = sequence.token_ids[sequence.places[:_WRITTEN_TOKENS]].tolist()
        return {
            "prompt": self._tokenizer.decode(sequence.token_ids[: sequence.start])[-_PROMPT_CHARS:],
            "tokens": [self._tokenizer.decode([token]) for token in ids],
            **{
                name: [
                    round(value, 4) if math.isfinite(value) else None
                    for value in values[: len(ids)].tolist()
                ]
                for name, values in logprobs.items()
            },
        }


def compute_moments(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a float64 tensor [4]: the sums of x^2, x n and n^2 over all sequences, and their
    number.

    `sums` [S]: x, the sum of a metric over the tokens of each sequence. `counts` [S]: n, the number
    of these tokens. The number of sequences counts only those with n > 0.
    """
    sequences = (counts > 0).sum().to(sums.dtype)
    return torch.stack([sums @ sums, sums @ counts, counts @ counts, sequences])


def standard_error(
    total: float, count: float, xx: float, xn: float, nn: float, sequences: float
) -> float:
    """Return the standard error of the mean `total / count` over independent sequences.

    The tokens of one sequence are not independent, but the sequences are. The result is therefore
    the error of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4), with the
    factor S / (S - 1) for the variance of S sequences. `xx`, `xn`, `nn` and `sequences` are the
    four values of `compute_moments`. There must be at least 2 sequences.
    """
    mean = total / count
    squares = max(xx - 2 * mean * xn + mean**2 * nn, 0.0)
    return math.sqrt(sequences / (sequences - 1) * squares) / count


def greedy_answers(
    rollouts: Rollouts, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[tuple[Rollout, str]]:
    """Return (greedy rollout, text of the answer) for each prompt.

    Greedy sampling always takes the most likely token.
    """
    batches = rollouts.generate(prompts, [0] * len(prompts), seed=0, greedy=True)
    return [(rollout, rollout.answer_text(tokenizer)) for batch in batches for rollout in batch]


def write_samples(folder: Path, step: int, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records of an evaluation to the file step-N.jsonl in `folder`, one JSON object per
    line.

    `folder`: the folder `samples` of the run directory for transcripts, or `token_logprobs` for
    records of tokens. Raises WrongState if a newer attempt has taken over the run.
    """
    folder.mkdir(exist_ok=True)
    require_unfenced()
    text = "".join(json.dumps(record) + "\n" for record in records)
    replace_file(folder / f"step-{step:06d}.jsonl", text)
