"""Updates of every objective, by one process or by groups that share the tokens of sequences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from clients.config.tables.common import StudentConfig
from clients.config.tables.rl_method import RLConfig
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.packing import Layout
from student_trainer.data.sequence import Rollout, TailDraws, TokenSequence
from student_trainer.loop.optimizer import clip_gradients
from student_trainer.loop.step import Objective
from student_trainer.model.loading import recompute_activations
from student_trainer.model.lora import add_adapters
from student_trainer.objectives.cross_entropy import CrossEntropyObjective
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.objectives.rl import KLTerm, RLObjective, RLSequence
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import full_tensors
from tests.forks import Forks
from tests.student_trainer.parallel.divided import MAX_GRADIENT_NORM, UPDATES, make
from tests.student_trainer.teachers.anchors import spread_student

VOCABULARY, K, DRAWS = 13, 4, 3
# Lengths of each process in turn: no multiple of a group's size; two tokens, of which a process
# of a group has none; and a sequence longer than the others together.
LENGTHS = ((7, 3, 5), (2,), (23, 4, 6, 2), (9, 8))
# Objective -> options of its RL method: a sequence-level ratio, and a KL in the reward.
METHODS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "offline": {},
    "sft": {},
    "rl": {"ratio": "sequence", "aggregate": "seq-mean-token-mean"},
    "rl-reward": {"kl_in": "reward"},
}


def objective(name: str) -> Objective:
    if name == "on_policy":
        return DistillationObjective("reverse", "bucket+draws", 1.3)
    if name == "offline":
        return DistillationObjective("forward", "bucket", 1.3, cross_entropy=0.3)
    if name == "sft":
        return CrossEntropyObjective()
    method = RLConfig.model_validate({"type": "rl", "top_k": K, **METHODS[name]})
    return RLObjective(method, (KLTerm("anchor", 0.3), KLTerm("teacher", 0.2)), has_reward=True)


def sequences(name: str, rank: int) -> list[ScoredSequence]:
    """Return the training data of a process: random tokens with random rows."""
    generator = torch.Generator().manual_seed(rank)
    return [_make_sequence(name, length, generator) for length in LENGTHS[rank % len(LENGTHS)]]


def _make_sequence(name: str, length: int, generator: torch.Generator) -> ScoredSequence:
    ids = torch.randint(VOCABULARY, (length,), generator=generator)
    start = max(1, length // 3)
    count = length - start
    order = torch.rand(count, VOCABULARY, generator=generator).argsort(1)
    head, draw_ids = order[:, :K], order[:, K : K + DRAWS]
    if name in ("offline", "sft"):
        return ScoredSequence(
            TokenSequence(ids, start, weight=0.5 + length), _make_rows(ids[start:], head, generator)
        )
    logprobs = -3 * torch.rand(count, 1 + DRAWS, generator=generator)
    draws = TailDraws(draw_ids.int(), logprobs[:, 1:])
    rollout = Rollout(ids, start, head, logprobs[:, 0], False, "", draws=draws)
    rows = _make_rows(ids[start:], head, generator, draw_ids)
    if name == "on_policy":
        return ScoredSequence(rollout, rows)
    return RLSequence(
        rollout,
        rows,
        other_rows=(_make_rows(ids[start:], head, generator, draw_ids),),
        advantage=torch.randn(count, generator=generator),
        is_included=True,
        old_logprobs=-3 * torch.rand(count, generator=generator),
    )


def _make_rows(
    tokens: Tensor, head: Tensor, generator: torch.Generator, draw_ids: Tensor | None = None
) -> RowBlock:
    p = torch.randn(len(tokens), VOCABULARY, generator=generator).log_softmax(1)
    head_logprobs = p.gather(1, head)
    return RowBlock(
        head.int().numpy(),
        head_logprobs.numpy(),
        torch.log1p(-head_logprobs.exp().sum(1)).numpy(),
        p.gather(1, tokens[:, None])[:, 0].numpy(),
        draw_logprobs=None if draw_ids is None else p.gather(1, draw_ids).numpy(),
    )


def learn(
    student: Replicated | Sharded, name: str, ranks: Sequence[int], layout: Layout
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make updates in float64 from the sequences of `ranks`, each of which is a batch.

    Return the metrics of the last update, and the weights after it.
    """
    student.trained.double()
    student.trained.train()
    objective_of_job = objective(name)
    trained_weights = [weight for weight in student.trained.parameters() if weight.requires_grad]
    # With a usual eps, rounding errors of gradients near 0 would become updates.
    optimizer = torch.optim.AdamW(trained_weights, lr=0.05, eps=1e-3)
    for _ in range(UPDATES):
        metrics: dict[str, Tensor] = {}
        for rank in ranks:
            group_batch = _double_batch(
                objective_of_job.batch(sequences(name, rank), student.device, layout)
            )
            for batch, is_own in student.batches_of_group(group_batch):
                out = student(
                    batch,
                    objective_of_job.loss(batch),
                    objective_of_job.temperature,
                    objective_of_job.needs_all_rows,
                )
                (out.loss_sum * student.gradient_ranks).backward()
                if is_own:
                    loss = {"loss": out.loss_sum.detach()}
                    for key, value in (dict(objective_of_job.metrics(batch, out)) | loss).items():
                        metrics[f"{rank}/{key}"] = value.double()
        metrics["norm"] = clip_gradients(student, MAX_GRADIENT_NORM).double()
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(student.trained.model.named_parameters())
    return metrics, full_tensors(weights, keep=True)


def _double_batch(batch: Batch) -> Batch:
    """Return the batch with float64 rows, as those of the student."""
    float64_tensors = {
        name: value.double()
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return cast(Batch, type(batch)(**vars(batch) | float64_tensors))


def student_of(architecture: str, attention: str, *, lora: bool) -> Any:
    model = make(architecture, {"sliding_window": 4})
    model.set_attn_implementation(attention)
    if lora:
        table = {"model": "-", "lora": {"rank": 2}}
        add_adapters(model, StudentConfig.model_validate(table))
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(0.3 * torch.randn(weight.shape))
    return model


def learn_in_process(
    out: Path, size: int, cases: Sequence[tuple[str, str, Layout, str, Any, bool]]
) -> None:
    """Train each student as one process of groups of `size`, and save metrics and weights."""
    rank = int(os.environ["RANK"])
    for number, (architecture, name, layout, attention, policy, lora) in enumerate(cases):
        model = student_of(architecture, attention, lora=lora)
        student = spread_student(model, "fsdp2", 1, size)
        recompute_activations(student.trained.model, policy)
        metrics, weights = learn(student, name, [rank], layout)
        save_file(metrics, out / f"{number}-{rank}-metrics.safetensors")
        save_file(weights, out / f"{number}-{rank}-weights.safetensors")


def run_processes(world: int, out: Path, *arguments: Any) -> None:
    """Run `learn_in_process` in `world` processes."""
    assert Forks(world, out / "group", learn_in_process, out, *arguments).wait(240) == [0] * world


def check_students(out: Path, students: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Record, as one process of a group, whether it accepts each student, in its chosen layout.

    students: architecture and settings. Rows of an accepted student equal those of the full model.
    """
    size = int(os.environ["WORLD_SIZE"])
    for number, (name, changes) in enumerate(students):
        student = spread_student(make(name, changes), "fsdp2", 1, size)
        try:
            student.choose_attention(StudentConfig(model="-"))
            with student.gathered():
                _check_rows(student)
            verdict = ""
        except InvalidInput as error:
            verdict = f"{error.field}: {error.message}"
        (out / f"{number}-{os.environ['RANK']}").write_text(verdict)


def _check_rows(student: Replicated | Sharded) -> None:
    """Compare the rows computed by a group, with draws, with the full copy; inside `gathered()`."""
    batch = objective("rl").batch(sequences("rl", 2), student.device, student.full.layout)
    _, expected = student.full.rows(batch, 1.3)
    _, rows = student.rows(batch, 1.3)
    assert expected.sample_logprobs is not None
    for name, values in vars(expected).items():
        torch.testing.assert_close(getattr(rows, name), values, rtol=1e-4, atol=1e-4)
