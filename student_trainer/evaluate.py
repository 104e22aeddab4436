"""Held-out evaluation: the KL to the teacher on the student's own samples, and task accuracy.

    python -m student_trainer.evaluate MODEL_DIR --data heldout.jsonl [--json]

prints the exact-match accuracy of a model's greedy answers; no teacher is needed for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from clients.config import DataConfig, JobConfig, StudentConfig
from protos.errors import DistillError
from student_trainer.answers import exact_match
from student_trainer.batches import make_batch, micro_batches
from student_trainer.distillation import distillation_loss, kl_metrics
from student_trainer.model import Student, load_model, load_tokenizer
from student_trainer.processes import raise_together
from student_trainer.prompts import Prompt, load_prompts
from student_trainer.rollouts import HuggingFaceRollouts, Rollout
from student_trainer.teachers import PendingRows, TeacherSource


class Evaluation:
    """Always the same prompts and the same random numbers, so that two evaluations compare."""

    def __init__(
        self,
        config: JobConfig,
        prompts: Sequence[Prompt],
        accelerator: Accelerator,
        tokenizer: Any,
        rollouts: HuggingFaceRollouts,
        teacher: TeacherSource,
    ) -> None:
        self._config = config
        rank, world = accelerator.process_index, accelerator.num_processes
        self._prompts = prompts[rank::world]
        # Below the training rollouts' numbers, which count from 0.
        self._numbers = [-1 - i for i in range(len(prompts))][rank::world]
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._teacher = teacher

    def __call__(self, student: Student) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(metrics, transcripts of a few answers of this process)."""
        student.eval()
        fault: DistillError | None = None
        kl = tokens = 0.0
        try:
            kl, tokens = self._kl(student)
        except DistillError as error:
            fault = error
        raise_together(self._accelerator, fault)
        sums = [kl, tokens, 0.0, 0.0]
        transcripts: list[dict[str, Any]] = []
        if self._config.eval.metric == "exact_match":
            answers = greedy_answers(self._rollouts, self._tokenizer, self._prompts)
            right = [exact_match(text, rollout.answer) for rollout, text in answers]
            sums[2:] = [float(sum(right)), float(len(right))]
            transcripts = [self._transcript(*pair) for pair in answers[:8]]
        total = self._accelerator.reduce(
            torch.tensor(sums, dtype=torch.float64, device=self._accelerator.device)
        ).tolist()
        metrics = {"eval/kl": total[0] / max(total[1], 1)}
        if total[3]:
            metrics["eval/accuracy"] = total[2] / total[3]
        return metrics, transcripts

    @torch.no_grad()
    def _kl(self, student: Student) -> tuple[float, float]:
        """(sum of the KL, number of tokens) over sampled answers."""
        method = self._config.method
        pending = [
            PendingRows(rollout, self._teacher.score(rollout))
            for batch in self._rollouts.generate(
                self._prompts, self._numbers, seed=self._config.seed
            )
            for rollout in batch
        ]
        kl = tokens = 0.0
        for group in micro_batches(pending, self._config.train.tokens_per_micro_batch):
            batch = make_batch([item.wait() for item in group], self._accelerator.device)
            out = student(batch, distillation_loss(batch, method), method.temperature)
            kl += float(kl_metrics(batch, out, method)["kl/teacher"])
            tokens += len(batch)
        return kl, tokens

    def _transcript(self, rollout: Rollout, text: str) -> dict[str, Any]:
        prompt = self._tokenizer.decode(rollout.token_ids[: rollout.start])
        return {"prompt": prompt, "answer": text, "reference": rollout.answer}


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
