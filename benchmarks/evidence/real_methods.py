"""On-policy, offline and fine-tuning on SmolLM2's cut, at equal teacher tokens and equal FLOPs.

    python -m benchmarks.evidence.real_methods --data train.jsonl [--seeds 3] [--rates 1e-4]

SmolLM2-135M-Instruct teaches a cut of itself (`benchmarks/shared/model_pairs.py`; 49,152 ids) two
tasks: questions of GSM8K, and short instructions in the chat format of the model. Each step learns
from one answer of at most 24 tokens to each of 4 prompts:

    sft         cross-entropy on answers that the teacher has sampled
    offline     forward KL to the teacher's rows of the same answers (k = 8, M = 8)
    on-policy   reverse KL to the teacher's rows of the student's own answers (k = 16, M = 48)

No prompt comes twice, so that after equal steps the teacher has sampled or scored equally many
tokens. FLOPs of the student: 6 a weight and token of prompt and answer, and 2 more where it samples
them: on-policy training has taken three quarters of the others' steps at equal FLOPs. Held out,
over all ids: KL(student||teacher) on the student's own answers, KL(teacher||student) and the
perplexity on answers of the teacher. There is no run with rewards: neither model gets a question of
GSM8K right in 24 tokens, and an instruction has no right answer. Each run is added to
benchmarks/results/evidence_real_methods.json when it ends; an interrupted benchmark resumes
there. A run takes two minutes of a core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.draws import training as on_policy
from benchmarks.evidence import offline_k as offline
from benchmarks.shared.evaluation import HELD_OUT_SEED, make_sampler, measure_kl
from benchmarks.shared.model_pairs import Pair, load_questions, make_pair
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout

STEPS, PROMPTS, TOKENS, HELD_OUT = 16, 4, 24, 16
TASKS = ("GSM8K", "instructions")
METHODS = ("on-policy", "offline", "sft")
BEFORE = "before"
OWN_ANSWERS, TEXTS = on_policy.TailLoss("bucket+draws", 16, 48), "bucket+teacher_samples"
OFFLINE, SFT = offline.OfflineLoss(TEXTS, 8), offline.OfflineLoss("cross-entropy")
REQUESTS = (
    "Explain in one sentence what {} is.",
    "Why is {} useful?",
    "Write a short poem about {}.",
    "Give three facts about {}.",
    "Describe {} to a child.",
    "What is the history of {}?",
    "Write a title for a book about {}.",
    "Name one danger of {}.",
)
SUBJECTS = (
    "salt", "gravity", "a bicycle", "the moon", "a library", "rain", "bread", "music", "a volcano",
    "paper", "electricity", "a bridge", "coffee", "the ocean", "a vaccine", "glass", "a compass",
    "chess", "cotton", "the internet", "a telescope", "honey", "a train", "money", "a garden",
    "iron", "a dictionary", "the sun", "soap", "a camera", "wood", "a clock",
)  # fmt: skip


@dataclass(frozen=True)
class RealMethodSetting:
    """One run."""

    task: str
    rate: float
    method: str
    seed: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_real_methods.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    pair = make_pair("real", options.work, options.data)
    result = load_results(options.out, {"machine": describe_machine(), "steps": options.steps})
    settings = [RealMethodSetting(task, 0.0, BEFORE, 0) for task in TASKS]
    settings += [
        RealMethodSetting(task, rate, method, seed)
        for rate in options.rates
        for seed in range(options.seeds)
        for task in TASKS
        for method in METHODS
    ]
    for setting in settings:
        if any(run | vars(setting) == run for run in result["runs"]):
            continue
        measurements = train(setting, pair, options.data, options.steps)
        add_run(options.out, result, vars(setting) | measurements)
        print(vars(setting), measurements["curve"][-1], flush=True)


def train(setting: RealMethodSetting, pair: Pair, data: Path, steps: int) -> dict[str, Any]:
    """Train once; return the seconds of the steps, and the measurements held out at the end.

    On-policy also after 3/4 of the steps. FLOPs and teacher tokens: of all steps so far.
    """
    torch.manual_seed(setting.seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (pair.teacher, pair.student)
    )
    prompts = make_prompts(setting.task, data, tokenizer, HELD_OUT + steps * PROMPTS)
    held_out, training = prompts[:HELD_OUT], prompts[HELD_OUT:]
    references = sample_answers(teacher, tokenizer, held_out, HELD_OUT_SEED)
    measured = {"held_out": held_out, "references": references}
    if setting.method == BEFORE:
        return {"curve": [{"step": 0} | measure(student, teacher, tokenizer, **measured)]}
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(setting.seed))
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=setting.rate, weight_decay=0.0, fused=True
    )
    weights = sum(parameter.numel() for parameter in student.parameters())
    flops_per_token = (8 if setting.method == "on-policy" else 6) * weights
    curve, flops, teacher_tokens = [], 0, 0
    began, measuring = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        step_prompts = [training[number] for number in order[(step - 1) * PROMPTS : step * PROMPTS]]
        loss, learned = mean_loss(setting, step, student, teacher, tokenizer, step_prompts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        flops += flops_per_token * sum(len(answer.token_ids) for answer in learned)
        teacher_tokens += sum(len(answer.completion) for answer in learned)
        if step == steps or (step == steps * 3 // 4 and setting.method == "on-policy"):
            paused = time.monotonic()
            measurements = measure(student.eval(), teacher, tokenizer, **measured)
            curve.append(
                {"step": step, "flops": flops, "teacher_tokens": teacher_tokens} | measurements
            )
            measuring += time.monotonic() - paused
    return {"seconds": time.monotonic() - began - measuring, "curve": curve}


def make_prompts(task: str, data: Path, tokenizer: Any, count: int) -> list[Prompt]:
    """Return `count` prompts, the same ones for each run: questions of GSM8K, or instructions."""
    if task == "GSM8K":
        return load_questions(data, tokenizer, count)
    requests = [request.format(subject) for request in REQUESTS for subject in SUBJECTS]
    random.Random(0).shuffle(requests)
    texts = [
        f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        for request in requests[:count]
    ]
    assert len(texts) == count, f"{len(requests)} instructions, not {count}"
    return [Prompt(np.array(tokenizer(text)["input_ids"], dtype=np.int32), "") for text in texts]


def sample_answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], seed: int
) -> list[Rollout]:
    """Return one answer that the model samples to each prompt, in batches of 16."""
    sampled_answers: list[Rollout] = []
    rollouts = make_sampler(model, tokenizer, TOKENS)
    for first in range(0, len(prompts), 16):
        batch = prompts[first : first + 16]
        (sampled,) = rollouts.generate(batch, range(first, first + len(batch)), seed=seed)
        sampled_answers += sampled
    return sampled_answers


def mean_loss(
    setting: RealMethodSetting,
    step: int,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
) -> tuple[Tensor, Sequence[Rollout]]:
    """Return the mean loss of the tokens of one answer to each prompt, and the answers.

    `sft` and `offline` of one seed learn from the same answers of the teacher.
    """
    seed = setting.seed * 10_000 + step
    if setting.method == "on-policy":
        rollouts = make_sampler(
            student, tokenizer, TOKENS, top_k=OWN_ANSWERS.k, draws=OWN_ANSWERS.draws
        )
        (answers,) = rollouts.generate(prompts, range(len(prompts)), seed=seed)
        return on_policy.mean_loss(OWN_ANSWERS, student.train(), teacher, answers), answers
    answers = sample_answers(teacher, tokenizer, prompts, seed)
    offline_loss = OFFLINE if setting.method == "offline" else SFT
    return offline.mean_loss(offline_loss, student.train(), teacher, to_texts(answers)), answers


def to_texts(answers: Sequence[Rollout]) -> list[offline.QuestionAnswer]:
    return [offline.QuestionAnswer(answer.token_ids.long(), answer.start) for answer in answers]


def measure(
    student: Any,
    teacher: Any,
    tokenizer: Any,
    held_out: Sequence[Prompt],
    references: Sequence[Rollout],
) -> dict[str, float]:
    """Return KL(student||teacher) on own answers; other metrics on the teacher's. In nats."""
    on_teacher_answers = offline.measure(student, teacher, to_texts(references))
    own_kl = measure_kl(student, teacher, tokenizer, held_out, TOKENS)
    return {
        "kl_own": own_kl,
        "kl_teacher": on_teacher_answers["kl"],
        "perplexity": on_teacher_answers["perplexity"],
    }


if __name__ == "__main__":
    main()
