"""The self-test of the student, at the start of an attempt.

It checks, on two sequences, that the assumptions of the training hold for this student. If a check
fails, the job uses a safe alternative, which is logged in one line, or the job is refused before
its first step. The self-test of the teacher is `teacher_service/serving/self_test.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.tables.job import TrainingJob
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.packing import Layout
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import local
from student_trainer.rollouts.sampling_probe import SamplingProbe, probe_sampling, rounding

log = logging.getLogger(__name__)

_SHORT, _LONG, _TOP_K = 6, 11, 8
# The limit of a difference is a multiple of the rounding noise of this model. The noise is measured
# in batches with equal log-probs, and then bounded by these multiples of the usual rounding.
_NOISE_FACTOR, _LEAST, _MOST = 4.0, 0.25, 2.5


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test.

    - layout: the placement of sequences in the lines of a batch.
    - fused: whether the head is a linear layer with at most a scale and a cap.
    - equal_lengths: whether prompts are sampled together only if their lengths are equal.
    - untrained: the names of the trainable weights that get no gradient.
    """

    layout: Layout
    fused: bool
    equal_lengths: bool
    untrained: tuple[str, ...]

    def __str__(self) -> str:
        parts = [
            "several sequences in a line" if self.layout != "padded" else "one sequence a line",
            "a fused head" if self.fused else "all logits in memory",
            "prompts of one length sampled together" if self.equal_lengths else "",
            f"{len(self.untrained)} weights without a gradient, such as {self.untrained[0]}"
            if self.untrained
            else "",
        ]
        return ", ".join(filter(None, parts))


def samples_in_trainer(config: TrainingJob) -> bool:
    """Return whether the trainer's own process samples answers for the job."""
    return config.rollout_engine is None and (config.answers_per_step > 0 or config.is_evaluated)


def run_self_test(
    student: Replicated | Sharded, tokenizer: Any, accelerator: Accelerator, *, samples: bool
) -> SelfTest:
    """Collective. Test the student, set its `equal_lengths`, and log the result.

    The test has a short and a longer sequence. It makes these comparisons:

    - training mode with evaluation mode, which must give bit-identical results
    - the short sequence in a batch with the short sequence alone
    - with `samples`, the sampling of tokens with a forward pass

    Each trainable weight must get a finite gradient. The student is in evaluation mode afterwards.
    `samples`: whether this process samples answers.

    Raises InvalidInput (`student.model` or `student.lora`) on all ranks if a rank has no safe
    alternative.
    """
    ids = torch.arange(_LONG) % student.trained.vocab_size
    passes = _run_passes(student, ids)
    raise_on_all_ranks(accelerator, lambda: _check_mode(passes))
    leak = _find_leak(passes, student.trained)
    if _has_exact_weights(student) and max_over_ranks(accelerator, int(leak is not None)):
        with _exact_products(student.trained):
            leak = _find_leak(_run_passes(student, ids), student.trained)
    raise_on_all_ranks(accelerator, lambda: _raise_leak(leak))
    faults, untrained = _find_untrained(student, ids)
    raise_on_all_ranks(accelerator, lambda: _check_gradients(student, faults, untrained))
    student.trained.eval()
    equal_lengths = False
    if samples:
        with student.gathered():
            full = student.full.eval()
            probe = probe_sampling(full.model, tokenizer, bf16=full.bf16)
        raise_on_all_ranks(accelerator, lambda: _check_sampling(probe))
        equal_lengths = bool(max_over_ranks(accelerator, int(probe.equal_lengths)))
    student.trained.equal_lengths = student.full.equal_lengths = equal_lengths
    result = SelfTest(
        student.trained.layout,
        student.trained._logit_map is not None,
        equal_lengths,
        untrained,
    )
    log.info("self-test passed: %s", result)
    return result


@dataclass(frozen=True)
class _Passes:
    """The log-probs of the same head ids in several passes.

    - alone: [T, K], of the short sequence in a batch of its own.
    - others: [T, K] each, of the short sequence in other batches, which must not change the
      log-probs.
    - evaluated: [N, K] each, of both sequences in one batch, from two passes in evaluation mode.
    - trained: [N, K] each, of the same batch, from two passes in training mode.
    """

    alone: Tensor
    others: tuple[Tensor, ...]
    evaluated: tuple[Tensor, Tensor]
    trained: tuple[Tensor, Tensor]


def _run_passes(student: Replicated | Sharded, ids: Tensor) -> _Passes:
    """Collective. Return the log-probs of all passes. Leaves the student in evaluation mode."""
    trained = student.trained.eval()
    top_k = min(_TOP_K, trained.vocab_size)
    short, longer = ids[:_SHORT], ids.flip(0)

    def logprobs(*sequences: Tensor) -> Tensor:
        return student.rows(_make_batch(student, [*sequences], head_ids), 1.0)[1].head_logprobs

    with student.passes():
        head_ids, rows = student.rows(_make_batch(student, [short]), 1.0, top_k)
        others = [[short] * 4, [short] * 8, [short, short[:-1]]]
        other_logprobs = tuple(logprobs(*batch)[: _SHORT - 1] for batch in others)
        evaluated = logprobs(short, longer), logprobs(short, longer)
        trained.train()
        in_training = logprobs(short, longer), logprobs(short, longer)
        trained.eval()
    return _Passes(rows.head_logprobs, other_logprobs, evaluated, in_training)


def _check_mode(passes: _Passes) -> None:
    """Raise InvalidInput if a log-prob is not finite, or differs between the two modes."""
    if not bool(passes.alone.isfinite().all()):
        raise _refuse("the logits are not finite", "choose a student whose weights are intact")
    # Some kernels of a GPU add in no fixed order, so that one of many equal passes may differ.
    # Noise changes every pass.
    first, second = passes.evaluated
    if torch.equal(first, second) and not any(
        torch.equal(first, in_training) for in_training in passes.trained
    ):
        difference = float((passes.trained[0] - first).abs().max())
        raise _refuse(
            f"training mode differs from evaluation mode by {difference:.2g} nats",
            "set dropout and other noise to 0 in config.json",
        )


def _find_leak(passes: _Passes, student: Student) -> InvalidInput | None:
    """Return the error for a student whose rows depend on a longer sequence in the batch.

    Returns None if they do not depend on it, beyond rounding errors.
    """
    difference = float((passes.evaluated[0][: _SHORT - 1] - passes.alone).abs().max())
    noise = max(float((other - passes.alone).abs().max()) for other in passes.others)
    usual = rounding(student.model, bf16=student.bf16)
    limit = min(max(_NOISE_FACTOR * noise, _LEAST * usual), _MOST * usual)
    if difference <= limit:
        return None
    return _refuse(
        f"a longer sequence in the batch changes its log-probs by {difference:.2g} nats;"
        f" at most {limit:.2g} is allowed",
        "choose a causal student"
        + (", or student.dtype = 'float32' if bfloat16 is too coarse for it" * student.bf16),
    )


def _raise_leak(leak: InvalidInput | None) -> None:
    if leak is not None:
        raise leak


def _has_exact_weights(student: Replicated | Sharded) -> bool:
    """Return whether the student computes in bfloat16, but has all weights in float32.

    Such a student can also compute in float32. A sharded student cannot, because its weights are
    gathered in bfloat16. A student with adapters cannot, because its frozen weights are bfloat16.
    """
    weights = student.trained.model.parameters()
    return (
        student.trained.bf16
        and isinstance(student, Replicated)
        and all(weight.dtype == torch.float32 for weight in weights if weight.is_floating_point())
    )


@contextmanager
def _exact_products(student: Student) -> Iterator[None]:
    """Context in which the student computes in float32.

    A difference that remains in float32 is a leak, not the rounding of bfloat16.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    student.bf16 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        student.bf16, torch.backends.cuda.matmul.allow_tf32 = True, tf32


def _check_sampling(probe: SamplingProbe) -> None:
    if probe.fault is not None:
        raise _refuse(probe.fault, "choose rollouts.engine = 'vllm', or another student")


def _find_untrained(student: Replicated | Sharded, ids: Tensor) -> tuple[int, tuple[str, ...]]:
    """Collective. Return how many weights have a gradient that is not finite, and which have none.

    The second value is the sorted names of the trainable weights without a gradient. Experts are
    never included, because other tokens may use them.
    """
    trained = student.trained.train()
    with student.synchronized(is_last=True):
        batch = _make_batch(student, [ids[:_SHORT], ids.flip(0)])
        loss = student(batch, lambda rows, _: -rows.token_logprobs, 1.0)
        loss.loss_sum.backward()  # type: ignore[no-untyped-call]
    weights = {name: w for name, w in trained.model.named_parameters() if w.requires_grad}
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    faults = torch.zeros(1, device=student.device)
    for shard in map(local, gradients.values()):
        if shard.numel():  # aminmax needs less memory than isfinite on all values
            faults += (~torch.stack(shard.aminmax()).isfinite()).any().to(student.device)
    trained.zero_grad(set_to_none=True)
    untrained = (name for name in weights.keys() - gradients.keys() if "expert" not in name)
    return int(student.sum_over_shards(faults)), tuple(sorted(untrained))


def _check_gradients(
    student: Replicated | Sharded, faults: int, untrained: tuple[str, ...]
) -> None:
    """Raise InvalidInput for a gradient that is not finite, and for an adapter without a gradient.

    Also raise it if DDP would wait forever for a weight without a gradient. `faults`: the number of
    gradients that are not finite. `untrained`: the names of the weights without a gradient.
    """
    if faults:
        raise _refuse("a gradient is not finite", "choose another student")
    if any(".lora_" in name for name in untrained):
        raise InvalidInput(
            f"the adapter {untrained[0]} gets no gradient",
            field="student.lora",
            hint="remove the table to train all weights",
        )
    if untrained and isinstance(student, Replicated) and student.gradient_ranks > 1:
        raise InvalidInput(
            f"the student's weight {untrained[0]} gets no gradient, so DDP would wait forever",
            field="train.sharding",
            hint="use 'fsdp2'",
        )


def _make_batch(
    student: Replicated | Sharded, sequences: list[Tensor], head_ids: Tensor | None = None
) -> Batch:
    """Return a padded batch of `sequences`.

    `head_ids` [n, k]: the head ids of the n rows of the first sequence; all rows of other sequences
    get the first of them. None: the only head id of each row is its own token.
    """
    scored = []
    for number, ids in enumerate(sequences):
        own_ids = ids[1:, None] if head_ids is None else head_ids[:1].expand(len(ids) - 1, -1)
        if head_ids is not None and number == 0:
            own_ids = head_ids
        scored.append(ScoredSequence(TokenSequence(ids, 1), placeholder_rows(_to_numpy(own_ids))))
    return make_batch(scored, student.device)


def _to_numpy(ids: Tensor) -> Any:
    return ids.int().cpu().numpy()


def _refuse(fault: str, hint: str) -> InvalidInput:
    return InvalidInput(
        f"the self-test of the student failed: {fault}", field="student.model", hint=hint
    )
