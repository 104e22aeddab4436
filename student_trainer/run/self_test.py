"""The self-test of the student at the start. It tests the assumptions of training on two sequences.

If a test fails, the job uses a safe alternative, which is logged in one line, or is refused before
its first step. The self-test of the teacher is `teacher_service/serving/self_test.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clients.config.tables.job import TrainingJob
from protos.errors import InvalidInput
from student_trainer.data.batch import Batch, ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.packing import Layout
from student_trainer.data.sequence import TokenSequence
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import local
from student_trainer.rollouts.sampling_probe import probe_sampling, rounding

log = logging.getLogger(__name__)

_SHORT, _LONG, _TOP_K = 6, 11, 8


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test.

    layout: placement of sequences in the lines of a batch. fused: whether the head is a linear
    layer, possibly scaled or capped. equal_lengths: whether only prompts of equal length are
    sampled together. untrained: names of the trainable weights that get no gradient.
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
    """Return True if the trainer's own process samples answers for the job."""
    return config.rollout_engine is None and (config.answers_per_step > 0 or config.is_evaluated)


def run_self_test(student: Replicated | Sharded, tokenizer: Any, *, samples: bool) -> SelfTest:
    """Collective. Test the student, set its `equal_lengths`, and log the result.

    The test uses a short and a longer sequence. It compares training mode with evaluation mode
    (bit-identical), the short sequence in a batch with the short sequence alone, and, with
    `samples`, sampling with a forward pass. Each trainable weight must get a finite gradient. The
    student is in evaluation mode afterwards.

    Raises InvalidInput (`student.model` or `student.lora`) if there is no safe path.
    """
    ids = torch.arange(_LONG) % student.trained.vocab_size
    with student.passes():
        _compare_passes(student, ids)
    untrained = _find_untrained(student, ids)
    student.trained.eval()
    equal_lengths = False
    if samples:
        with student.gathered():
            full = student.full.eval()
            probe = probe_sampling(full.model, tokenizer, bf16=full.bf16)
        if probe.fault is not None:
            raise _refuse(probe.fault, "choose rollouts.engine = 'vllm', or another student")
        equal_lengths = probe.equal_lengths
    student.trained.equal_lengths = student.full.equal_lengths = equal_lengths
    result = SelfTest(
        student.trained.layout,
        student.trained._logit_map is not None,
        equal_lengths,
        untrained,
    )
    log.info("self-test passed: %s", result)
    return result


def _compare_passes(student: Replicated | Sharded, ids: Tensor) -> None:
    """Collective. Raise InvalidInput if a row depends on the mode, or on the other sequence."""
    trained = student.trained.eval()
    top_k = min(_TOP_K, trained.vocab_size)
    head_ids, rows = student.rows(_make_batch(student, [ids[:_SHORT]]), 1.0, top_k)
    if not bool(rows.head_logprobs.isfinite().all()):
        raise _refuse("the logits are not finite", "choose a student whose weights are intact")
    both = _make_batch(student, [ids[:_SHORT], ids.flip(0)], head_ids)
    evaluated, repeated = (student.rows(both, 1.0)[1].head_logprobs for _ in range(2))
    trained.train()
    logprobs = student.rows(both, 1.0)[1].head_logprobs
    trained.eval()
    # Some kernels of a GPU add in no fixed order, and two equal passes differ too.
    if not torch.equal(logprobs, evaluated) and torch.equal(evaluated, repeated):
        difference = float((logprobs - evaluated).abs().max())
        raise _refuse(
            f"training mode differs from evaluation mode by {difference:.2g} nats",
            "switch the noise off in config.json",
        )
    difference = float((evaluated[: _SHORT - 1] - rows.head_logprobs).abs().max())
    if not difference <= rounding(trained.model, bf16=trained.bf16):
        raise _refuse(
            f"a longer sequence in the batch changes its log-probs by {difference:.2g} nats",
            "choose a causal student",
        )


def _find_untrained(student: Replicated | Sharded, ids: Tensor) -> tuple[str, ...]:
    """Collective. Return the names of the trainable weights without a gradient.

    Experts count as trained, because other tokens may call them. Raises InvalidInput for a
    non-finite gradient, and for an adapter without a gradient.
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
        if shard.numel():  # the extremes need no tensor of the size of a weight, isfinite does
            faults += (~torch.stack(shard.aminmax()).isfinite()).any().to(student.device)
    trained.zero_grad(set_to_none=True)
    if float(student.sum_over_shards(faults)):
        raise _refuse("a gradient is not finite", "choose another student")
    untrained = tuple(name for name in weights.keys() - gradients.keys() if "expert" not in name)
    if any(".lora_" in name for name in untrained):
        raise InvalidInput(
            f"the adapter {min(untrained)} gets no gradient",
            field="student.lora",
            hint="remove the table to train all weights",
        )
    if untrained and isinstance(student, Replicated) and student.gradient_ranks > 1:
        raise InvalidInput(
            f"the student's weight {min(untrained)} gets no gradient, so DDP would wait forever",
            field="train.sharding",
            hint="use 'fsdp2'",
        )
    return tuple(sorted(untrained))


def _make_batch(
    student: Replicated | Sharded, sequences: list[Tensor], head_ids: Tensor | None = None
) -> Batch:
    """Return a padded batch; `head_ids` [n, k]: of the first sequence, otherwise each token's."""
    scored = []
    for ids in sequences:
        own_ids = ids[1:, None] if head_ids is None else head_ids[:1].expand(len(ids) - 1, -1)
        scored.append(ScoredSequence(TokenSequence(ids, 1), placeholder_rows(_to_numpy(own_ids))))
    if head_ids is not None:
        scored[0] = ScoredSequence(scored[0].sequence, placeholder_rows(_to_numpy(head_ids)))
    return make_batch(scored, student.device)


def _to_numpy(ids: Tensor) -> Any:
    return ids.int().cpu().numpy()


def _refuse(fault: str, hint: str) -> InvalidInput:
    return InvalidInput(
        f"the self-test of the student failed: {fault}", field="student.model", hint=hint
    )
