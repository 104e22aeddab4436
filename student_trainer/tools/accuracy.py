"""Measure the exact-match accuracy of a model's greedy answers. Needs no teacher.

python -m student_trainer.tools.accuracy MODEL_DIR --data heldout.jsonl [--json]
"""

from __future__ import annotations

import argparse
import json

import torch

from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from student_trainer.data.prompts import load_prompts
from student_trainer.loop.evaluation import greedy_answers
from student_trainer.model.loading import load_model, load_tokenizer
from student_trainer.rewards.sample import exact_match
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler


def accuracy(model_path: str, data: DataConfig, *, prompts: int, max_new_tokens: int) -> float:
    """Return the share of a model's greedy answers that match the reference, in [0, 1].

    `model_path`: a Hugging Face directory. `prompts`: the maximum number of prompts; they are
    chosen at random with seed 0. Uses a GPU if there is one. Raises InvalidInput if the data or the
    model cannot be read.
    """
    student = StudentConfig(model=model_path)
    tokenizer = load_tokenizer(student)
    model = load_model(student).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    _, held_out_prompts = load_prompts(data, tokenizer, held_out=prompts, max_tokens=4096, seed=0)
    rollouts = HuggingFaceRollouts(
        Sampler(model, tokenizer, top_k=0, temperature=1.0),
        max_new_tokens=max_new_tokens,
        batch_tokens=65536,
    )
    answers = greedy_answers(rollouts, tokenizer, held_out_prompts)
    return sum(exact_match(text, rollout.answer) for rollout, text in answers) / len(answers)


def main() -> None:
    """Read the arguments, measure the accuracy, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL_DIR", help="a Hugging Face directory")
    parser.add_argument("--data", required=True, help="a file of records")
    parser.add_argument("--prompt-column", default="prompt", help="column with the prompt")
    parser.add_argument("--answer-column", default="answer", help="column with the reference")
    parser.add_argument("--prompts", type=int, default=1000, help="the most prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens of one answer")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
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
