"""The losses that `benchmarks.cross_tokenizer` compares, of a student and answers.

ours            the objectives of the jobs (`student_trainer/objectives`)
cross-entropy   of the teacher's text in the student's tokens
ULD             arXiv 2402.12030: the cross-entropy, and 1.5 times the L1 distance between the
                sorted probabilities of both at the same position of the answer. Of the teacher's
                sorted probabilities, those beyond the student's number of ids have no gradient.
GOLD            huggingface.co, "Unlocking On-Policy Distillation for Any Model Family", as TRL 1.16
                defines it with `use_uld_loss`, `uld_use_hybrid_loss` and the merge "bayesian"
                (its default merge, "observed", reads the logits one position late), beta = 0.5:
                chunks of equal bytes, without the end; of each, the distribution of the last token
                times the probabilities of those before; ids with the same token in both
                vocabularies: the generalised JSD; the others: the L1 distance of the sorted
                probabilities. Weights: the share of the teacher's ids that are matched, and the
                rest; or 1 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cross_tokenizer.material import Material, Stored, prompts
from benchmarks.shared.evaluation import compute_logits, hidden_states
from clients.alignment.alignment import Alignment
from protos.rows.codec import RowBlock
from student_trainer.data.aligned import AlignedBatch, make_aligned_batch
from student_trainer.data.batch import ScoredSequence
from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence
from student_trainer.losses import Rows
from student_trainer.objectives.cross_tokenizer import CrossTokenizerObjective
from student_trainer.objectives.stored_answers import StoredAnswersObjective
from student_trainer.teachers.other_tokenizer import aligned_rows
from student_trainer.teachers.other_tokenizer_store import Match, mapped_rows, unit_rows

ULD_WEIGHT = 1.5
SMALLEST = 1e-8  # of the probabilities whose logarithm GOLD takes


def encoded(material: Material, number: int, match: Match) -> ScoredSequence:
    """Return a stored answer in the student's tokens, with the rows of an offline job."""
    stored = material.stored[number]
    written = stored.ids.numpy().astype(np.int32)
    found = material.reads_teacher.align(written, has_end=stored.ended)
    assert found is not None, "no tokenizer here normalizes"
    if match == "row":
        rows = mapped_rows(found, written, stored.rows, material.token_map)
    else:
        rows = unit_rows(found, stored.rows.token_logprobs, match)
    (asked,) = prompts(material.student_words, [material.questions[number]])
    ids = np.concatenate([asked.ids, found.reader_ids]).astype(np.int64)
    return ScoredSequence(TokenSequence(torch.from_numpy(ids), len(asked.ids)), rows)


def logprobs(student: Any, batch: AlignedBatch) -> Tensor:
    """Return the student's log-probs of every id, [N, V]; V is small here."""
    states = student.base_model(**batch.inputs, use_cache=False).last_hidden_state
    found: Tensor = compute_logits(student, batch.select(states)).log_softmax(1)
    return found


def rows_of(table: Tensor, batch: AlignedBatch) -> Rows:
    own = table.gather(1, batch.token_ids[:, None])[:, 0]
    ids = batch.sample_ids
    samples = None if ids is None else table.gather(1, ids)
    return Rows(table[:, :0], torch.zeros_like(own), own, samples)


def stored_loss(
    student: Any, scored: Sequence[ScoredSequence], match: Match | None, cross_entropy: float
) -> Tensor:
    """Return the mean over tokens of the loss of an offline job; None: the cross-entropy."""
    batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
    rows = rows_of(logprobs(student, batch), batch)
    if match is None:
        return -rows.token_logprobs.mean()
    objective = StoredAnswersObjective(match != "row", 1.0, cross_entropy)
    return objective.loss(batch)(rows, slice(0, len(batch))).mean()


def uld_loss(student: Any, scored: Sequence[ScoredSequence], answers: Sequence[Stored]) -> Tensor:
    batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
    table = logprobs(student, batch)
    parts = table.exp().sort(1, descending=True).values.split([len(one.rows) for one in scored])
    distances = []
    for ours, stored in zip(parts, answers, strict=True):
        both = min(len(ours), len(stored.likeliest))
        distance = (ours[:both] - stored.likeliest[:both, : ours.shape[1]].float()).abs()
        distances.append(distance.sum() / both)
    own = rows_of(table, batch).token_logprobs
    return -own.mean() + ULD_WEIGHT * torch.stack(distances).mean()


class OnPolicy:
    """The losses of answers that the student samples, scored by the teacher's model."""

    def __init__(self, material: Material) -> None:
        self._teacher = material.teacher
        self._asked = prompts(material.teacher_words, material.questions)
        self._aligner = material.reads_student
        ours, theirs = material.student_words.get_vocab(), material.teacher_words.get_vocab()
        same = sorted(ours.keys() & theirs.keys())
        self._ours = torch.tensor([ours[token] for token in same])
        self._theirs = torch.tensor([theirs[token] for token in same])
        self._share = len(same) / len(theirs)
        self._other_ours = _others(len(ours), self._ours)
        self._other_theirs = _others(material.teacher.config.vocab_size, self._theirs)

    @torch.no_grad()
    def read(
        self, written: Sequence[Rollout], numbers: Sequence[int]
    ) -> tuple[list[Rollout], list[Alignment], list[Tensor]]:
        """Return the answers that can be aligned, and the teacher's log-probs [T, V] of each."""
        found = [self._align(one) for one in written]
        kept = [
            (one, alignment, self._asked[number])
            for one, alignment, number in zip(written, found, numbers, strict=True)
            if alignment is not None and len(alignment.reader_ids)
        ]
        read = []
        for _, alignment, asked in kept:
            ids = np.concatenate([asked.ids, alignment.reader_ids]).astype(np.int64)
            read.append(TokenSequence(torch.from_numpy(ids), len(asked.ids)))
        states: Any = read  # they are all that `hidden` needs of rollouts
        table = compute_logits(self._teacher, hidden_states(self._teacher, states)).log_softmax(1)
        parts = table.split([sequence.learned for sequence in read])
        return [one for one, _, _ in kept], [of for _, of, _ in kept], list(parts)

    def word(self, student: Any, written: Sequence[Rollout], numbers: Sequence[int]) -> Tensor:
        """Return the mean over tokens of the loss of an on-policy job."""
        answers, alignments, tables = self.read(written, numbers)
        scored = [
            ScoredSequence(one, aligned_rows(one, found, None, _block(found, table)))
            for one, found, table in zip(answers, alignments, tables, strict=True)
        ]
        batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
        rows = rows_of(logprobs(student, batch), batch)
        loss = CrossTokenizerObjective("word", 1.0).loss(batch)
        return loss(rows, slice(0, len(batch))).mean()

    def gold(
        self, student: Any, written: Sequence[Rollout], numbers: Sequence[int], *, even: bool
    ) -> Tensor:
        """Return GOLD's loss, the mean over answers. `even`: both weights are 1."""
        answers, alignments, tables = self.read(written, numbers)
        ours = compute_logits(student, hidden_states(student, answers)).log_softmax(1)
        parts = ours.split([len(one.completion) for one in answers])
        weights = (1.0, 1.0) if even else (self._share, 1 - self._share)
        losses = []
        for one, found, mine, theirs in zip(answers, alignments, parts, tables, strict=True):
            chunks = _text_chunks(found, ended=not one.truncated)
            if not len(chunks):
                continue
            p = _merged(mine, one.completion, found.chunk, chunks)
            q = _merged(theirs, torch.from_numpy(found.reader_ids), found.reader_chunk, chunks)
            matched = _jsd(p[:, self._ours], q[:, self._theirs])
            other = _sorted_distance(p[:, self._other_ours], q[:, self._other_theirs])
            losses.append((weights[0] * matched + weights[1] * other) / len(chunks))
        return torch.stack(losses).mean()

    def string_cost(
        self, student: Any, written: Sequence[Rollout], numbers: Sequence[int]
    ) -> float:
        """Return the sum of log p - log q over the settled bytes of answers, per byte, in nats."""
        answers, alignments, tables = self.read(written, numbers)
        cost = size = 0.0
        for one, found, table in zip(answers, alignments, tables, strict=True):
            ours = found.read & found.settled
            cost += float(one.token_logprobs.numpy()[ours].sum())
            cost -= float(_block(found, table).token_logprobs[found.reader_settled].sum())
            size += float(self._aligner.writer.lengths[one.completion.numpy()[ours]].sum())
        return cost / size

    def _align(self, one: Rollout) -> Alignment | None:
        return self._aligner.align(
            one.completion.numpy().astype(np.int32), has_end=not one.truncated
        )


def _block(found: Alignment, table: Tensor) -> RowBlock:
    ids = torch.from_numpy(found.reader_ids.astype(np.int64))[:, None]
    own = table.gather(1, ids)[:, 0].numpy()
    none = np.zeros((len(own), 1))
    return RowBlock(none.astype(np.int32), none.astype(np.float32), none[:, 0], own)


def _others(count: int, ids: Tensor) -> Tensor:
    left = torch.ones(count, dtype=torch.bool)
    left[ids] = False
    return left.nonzero()[:, 0]


def _text_chunks(found: Alignment, *, ended: bool) -> np.ndarray:
    """Return the numbers of the chunks that both have, without that of the end."""
    both: np.ndarray = np.intersect1d(found.chunk[found.read], found.reader_chunk)
    return both[:-1] if ended and not found.stopped else both


def _merged(table: Tensor, ids: Tensor, chunk: np.ndarray, chunks: np.ndarray) -> Tensor:
    """Return the distribution [C, V] of the last token of each chunk, times those before it."""
    own = table.gather(1, ids.long()[:, None])[:, 0]
    last = torch.from_numpy(np.searchsorted(chunk, chunks, side="right") - 1)
    first = torch.from_numpy(np.searchsorted(chunk, chunks))
    sums = torch.cat([own.new_zeros(1), own.cumsum(0)])
    return (table[last] + (sums[last] - sums[first])[:, None]).exp()


def _jsd(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of the generalised JSD of matched ids, beta = 0.5."""
    log_p, log_q = (of.clamp(min=SMALLEST).log() for of in (p, q))
    middle = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    both = log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)
    return 0.5 * both.sum()


def _sorted_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of |p - q| of sorted probabilities; q beyond p's number has no gradient."""
    width = min(p.shape[1], q.shape[1])
    ours, theirs = p.sort(1, descending=True).values, q.topk(width, 1).values
    return (ours[:, :width] - theirs).abs().sum() + ours[:, width:].abs().sum()
