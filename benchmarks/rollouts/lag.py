"""The held-out KL of a student that learns from answers of stale weights, by lag.

    python -m benchmarks.rollouts.lag --data train.jsonl [--seeds 3] [--work runs/draws]

With a lag of L, step m learns from answers that the weights of step max(0, m - 1 - L) sampled, as
the table `rollouts` of a job does it. Every run is made with the weights p / mu that a job always
has, and without them, which no job can choose. The pair is the toy of
`benchmarks.shared.model_pairs`; the loss is the default of an on-policy job. Each run is added to
the file of results when it ends; an interrupted benchmark resumes there. The picture is
docs/lag.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rollouts.lag_picture import draw
from benchmarks.shared.evaluation import compute_logits, hidden_states, measure_kl
from benchmarks.shared.model_pairs import Pair, load_questions, make_pair
from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.losses import Rows, fused_linear_loss, mismatch, rows_from_logits, topk_kl
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

LAGS = (0, 1, 2, 4, 8)
# The second is the default of a job, with which these models hardly change in so few steps.
LEARNING_RATES = (1e-3, 1e-5)


@dataclass(frozen=True)
class LagSizes:
    """prompts: per step, one answer each. tokens: maximum of an answer. held_out: prompts."""

    prompts: int = 8
    tokens: int = 32
    held_out: int = 32
    steps: int = 50
    k: int = 16
    draws: int = 48


@dataclass(frozen=True)
class Run:
    """weighted: draws have the weights p / mu; otherwise as if the student had drawn them."""

    learning_rate: float
    lag: int
    weighted: bool
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lag.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/lag.png"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=LagSizes().steps)
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pair, sizes = make_pair("toy", options.work, options.data), LagSizes(steps=options.steps)
    result = _load_result(options.out, sizes)
    for rate, seed, lag, weighted in itertools.product(
        LEARNING_RATES, range(options.seeds), LAGS, (True, False)
    ):
        run = Run(rate, lag, weighted, seed)
        if any(asdict(run).items() <= run_result.items() for run_result in result["runs"]):
            continue
        run_result = asdict(run) | train(run, pair, options.data, sizes)
        result["runs"].append(run_result)
        partial = options.out.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.rename(options.out)
        print(run_result, flush=True)
    print(draw(result, options.picture))


def _load_result(path: Path, sizes: LagSizes) -> dict[str, Any]:
    """Return the results of an earlier start; without its runs if they had other sizes."""
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result if result.items() >= asdict(sizes).items() else {**asdict(sizes), "runs": []}


def train(run: Run, pair: Pair, data: Path, sizes: LagSizes) -> dict[str, Any]:
    """Train once. Return the exact KL afterwards, and the mean ratio/ess and ratio/kl."""
    torch.manual_seed(run.seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32).eval()
    student, sampling = (
        AutoModelForCausalLM.from_pretrained(pair.student, dtype=torch.float32) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=run.learning_rate, weight_decay=0.0)
    questions = load_questions(data, tokenizer, sizes.held_out + sizes.steps * sizes.prompts)
    held_out, training = questions[: sizes.held_out], questions[sizes.held_out :]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(run.seed))
    rollouts = HuggingFaceRollouts(
        Sampler(sampling.eval(), tokenizer, top_k=sizes.k, temperature=1.0, draws=sizes.draws),
        max_new_tokens=sizes.tokens,
        batch_tokens=1 << 20,
    )
    versions: list[dict[str, Tensor]] = []
    figures: dict[str, list[float]] = {"ratio/ess": [], "ratio/kl": []}
    for step in range(1, sizes.steps + 1):
        versions.append({name: weight.clone() for name, weight in student.state_dict().items()})
        versions = versions[-run.lag - 1 :]  # of the steps max(0, step - 1 - lag) to step - 1
        sampling.load_state_dict(versions[0])
        numbers = range((step - 1) * sizes.prompts, step * sizes.prompts)
        step_questions = [training[order[number]] for number in numbers]
        (answers,) = rollouts.generate(step_questions, numbers, seed=run.seed)
        loss, ratios = _mean_loss(student.train(), teacher, answers, weighted=run.weighted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        for name, values in figures.items():
            values.append(float(ratios[name][0] / ratios[name][1]))
    after = measure_kl(student.eval(), teacher, tokenizer, held_out, sizes.tokens)
    means = {name: statistics.mean(values) for name, values in figures.items()}
    return {"after": after, **means}


def _mean_loss(
    student: Any, teacher: Any, answers: Sequence[Rollout], *, weighted: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of all sampled tokens, and the mismatch with the sampler."""
    with torch.no_grad():
        teacher_logits = compute_logits(teacher, hidden_states(teacher, answers))
    tokens = torch.cat([answer.completion for answer in answers])
    head = torch.cat([answer.head_ids for answer in answers]).long()
    draws = TailDraws.joined([answer.draws for answer in answers if answer.draws is not None])
    ids = draws.ids.long()
    teacher_rows = rows_from_logits(teacher_logits, head, tokens, sample_ids=ids)
    in_head = (head == tokens[:, None]).any(1)

    def compute_loss(rows: Rows, index: slice) -> Tensor:
        # None: as if the student of this step had drawn them.
        draw_logprobs = draws.logprobs[index] if weighted else None
        return topk_kl(
            rows, teacher_rows[index], in_head[index], direction="reverse", tail="bucket+draws",
            draw_logprobs=draw_logprobs,
        )  # fmt: skip

    weight = student.get_output_embeddings().weight
    output = fused_linear_loss(
        hidden_states(student, answers), weight, head, tokens, compute_loss, sample_ids=ids
    )
    sampled = torch.cat([answer.token_logprobs for answer in answers])
    return output.loss_sum / len(tokens), mismatch(output.rows.token_logprobs, sampled)


if __name__ == "__main__":
    main()
