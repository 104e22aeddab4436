"""Held-out evaluation: the KL to the teacher, perplexity of stored text, and task accuracy.

    python -m student_trainer.evaluate MODEL_DIR --data heldout.jsonl [--json]

prints the exact-match accuracy of a model's greedy answers; no teacher is needed for it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config import DataConfig, StudentConfig
from protos.errors import DistillError
from student_trainer.answers import exact_match
from student_trainer.batches import make_batch
from student_trainer.distillation import Objective, batch_metrics, distillation_loss
from student_trainer.model import Student, load_model, load_tokenizer
from student_trainer.packing import micro_batches
from student_trainer.processes import raise_together
from student_trainer.prompts import Prompt, load_prompts
from student_trainer.rollouts import HuggingFaceRollouts, Rollout
from student_trainer.teachers import PendingRows

# Of `batch_metrics`; the perplexity is made of the mean.
_MEASURED = {
    "kl/teacher": "eval/kl",
    "kl/teacher_bound": "eval/kl_bound",
    "cross_entropy": "eval/perplexity",
}
_HIGHEST_LOG = 700.0  # whose exponential is a number


class Examination:
    """Greedy answers, always to the same prompts, against the references."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        accelerator: Accelerator,
        tokenizer: Any,
        rollouts: HuggingFaceRollouts,
    ) -> None:
        self._prompts = prompts[accelerator.process_index :: accelerator.num_processes]
        self._tokenizer = tokenizer
        self._rollouts = rollouts

    def __call__(self) -> tuple[int, int, list[dict[str, Any]]]:
        """(right answers, answers, transcripts of a few) of this process."""
        answers = greedy_answers(self._rollouts, self._tokenizer, self._prompts)
        right = [exact_match(text, rollout.answer) for rollout, text in answers]
        return sum(right), len(right), [self._transcript(*pair) for pair in answers[:8]]

    def _transcript(self, rollout: Rollout, text: str) -> dict[str, Any]:
        prompt = self._tokenizer.decode(rollout.token_ids[: rollout.start])
        return {"prompt": prompt, "answer": text, "reference": rollout.answer}


class Evaluation:
    """The KL on held-out sequences, and the examination if there is one."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        held_out: Callable[[], list[PendingRows]],
        examination: Examination | None,
        *,
        tokens_per_micro_batch: int,
    ) -> None:
        """`held_out`: this process's share; the same each time, so that two evaluations compare."""
        self._accelerator = accelerator
        self._objective = objective
        self._held_out = held_out
        self._examination = examination
        self._most = tokens_per_micro_batch

    def __call__(self, student: Student) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(metrics, transcripts of a few answers of this process)."""
        student.eval()
        fault: DistillError | None = None
        sums = torch.zeros(len(_MEASURED) + 1, 2, dtype=torch.float64)
        try:
            sums[:-1] = self._measured(student)
        except DistillError as error:
            fault = error
        raise_together(self._accelerator, fault)
        transcripts: list[dict[str, Any]] = []
        if self._examination is not None:
            right, count, transcripts = self._examination()
            sums[-1] = torch.tensor([right, count])
        total = self._accelerator.reduce(sums.to(self._accelerator.device)).tolist()
        names = [*_MEASURED.values(), "eval/accuracy"]
        metrics = {
            n: found / count for n, (found, count) in zip(names, total, strict=True) if count
        }
        if "eval/perplexity" in metrics:
            metrics["eval/perplexity"] = math.exp(min(metrics["eval/perplexity"], _HIGHEST_LOG))
        return metrics, transcripts

    @torch.no_grad()
    def _measured(self, student: Student) -> Tensor:
        """(sum, number) of each metric of _MEASURED."""
        sums = torch.zeros(len(_MEASURED), 2, dtype=torch.float64)
        objective = self._objective
        for group in micro_batches(self._held_out(), self._most, pack=student.packs):
            scored = [item.wait() for item in group]
            batch = make_batch(scored, self._accelerator.device, pack=student.packs)
            out = student(batch, distillation_loss(batch, objective), objective.temperature)
            found = batch_metrics(batch, out, objective)
            sums += torch.stack([found[name] for name in _MEASURED]).double().cpu()
        return sums


def greedy_answers(
    rollouts: HuggingFaceRollouts, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[tuple[Rollout, str]]:
    """The likeliest answer to each prompt, and its text."""
    batches = rollouts.generate(prompts, [0] * len(prompts), seed=0, greedy=True)
    return [
        (rollout, str(tokenizer.decode(rollout.completion, skip_special_tokens=True)))
        for batch in batches
        for rollout in batch
    ]


def accuracy(model_path: str, data: DataConfig, *, prompts: int, max_new_tokens: int) -> float:
    """Share of right greedy answers of the model at `model_path`."""
    student = StudentConfig(model=model_path)
    tokenizer = load_tokenizer(student)
    model = load_model(student).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    _, chosen, _ = load_prompts(data, tokenizer, held_out=prompts, max_tokens=4096, seed=0)
    rollouts = HuggingFaceRollouts(
        model,
        tokenizer,
        top_k=0,
        temperature=1.0,
        max_new_tokens=max_new_tokens,
        batch_tokens=65536,
    )
    answers = greedy_answers(rollouts, tokenizer, chosen)
    return sum(exact_match(text, rollout.answer) for rollout, text in answers) / len(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="a .jsonl or .parquet file")
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--answer-column", default="answer")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data = DataConfig(
        path=options.data,
        eval_path=options.data,
        prompt_column=options.prompt_column,
        answer_column=options.answer_column,
    )
    share = accuracy(
        options.model, data, prompts=options.prompts, max_new_tokens=options.max_new_tokens
    )
    print(json.dumps({"accuracy": share}) if options.json else f"accuracy {share:.3f}")


if __name__ == "__main__":
    main()
