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

from benchmarks.cross_tokenizer.material import CrossTokenizerMaterial, StoredAnswer, make_prompts
from benchmarks.shared.evaluation import compute_logits, hidden_states
from clients.cross_tokenizer.alignment import Alignment
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedBatch, make_aligned_batch
from student_trainer.cross_tokenizer.objectives import (
    CrossTokenizerObjective,
    StoredAnswersObjective,
)
from student_trainer.cross_tokenizer.store import Match, mapped_rows, unit_rows
from student_trainer.cross_tokenizer.teacher import aligned_rows
from student_trainer.data.batch import ScoredSequence
from student_trainer.data.sequence import Rollout, TokenSequence
from student_trainer.losses import Rows

ULD_WEIGHT = 1.5
SMALLEST = 1e-8  # of the probabilities whose logarithm GOLD takes


def encode_stored_answer(
    material: CrossTokenizerMaterial, number: int, match: Match
) -> ScoredSequence:
    """Return a stored answer in the student's tokens, with the rows of an offline job."""
    stored = material.stored[number]
    teacher_ids = stored.ids.numpy().astype(np.int32)
    alignment = material.reads_teacher.align(teacher_ids, has_end=stored.ended)
    assert alignment is not None, "no tokenizer here normalizes"
    if match == "row":
        rows = mapped_rows(alignment, teacher_ids, stored.rows, material.token_map)
    else:
        rows = unit_rows(alignment, stored.rows.token_logprobs, match)
    (prompt,) = make_prompts(material.student_words, [material.questions[number]])
    ids = np.concatenate([prompt.ids, alignment.reader_ids]).astype(np.int64)
    return ScoredSequence(TokenSequence(torch.from_numpy(ids), len(prompt.ids)), rows)


def student_logprobs(student: Any, batch: AlignedBatch) -> Tensor:
    """Return the student's log-probs of every id, [N, V]; V is small here."""
    states = student.base_model(**batch.inputs, use_cache=False).last_hidden_state
    logprobs: Tensor = compute_logits(student, batch.select(states)).log_softmax(1)
    return logprobs


def rows_of_table(table: Tensor, batch: AlignedBatch) -> Rows:
    token_logprobs = table.gather(1, batch.token_ids[:, None])[:, 0]
    ids = batch.sample_ids
    samples = None if ids is None else table.gather(1, ids)
    return Rows(table[:, :0], torch.zeros_like(token_logprobs), token_logprobs, samples)


def stored_loss(
    student: Any, scored: Sequence[ScoredSequence], match: Match | None, cross_entropy: float
) -> Tensor:
    """Return the mean over tokens of the loss of an offline job; None: the cross-entropy."""
    batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
    rows = rows_of_table(student_logprobs(student, batch), batch)
    if match is None:
        return -rows.token_logprobs.mean()
    objective = StoredAnswersObjective(match != "row", 1.0, cross_entropy)
    return objective.loss(batch)(rows, slice(0, len(batch))).mean()


def uld_loss(
    student: Any, scored: Sequence[ScoredSequence], answers: Sequence[StoredAnswer]
) -> Tensor:
    batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
    table = student_logprobs(student, batch)
    parts = (
        table.exp()
        .sort(1, descending=True)
        .values.split([len(sequence.rows) for sequence in scored])
    )
    distances = []
    for probabilities, stored in zip(parts, answers, strict=True):
        length = min(len(probabilities), len(stored.likeliest))
        distance = (
            probabilities[:length] - stored.likeliest[:length, : probabilities.shape[1]].float()
        ).abs()
        distances.append(distance.sum() / length)
    token_logprobs = rows_of_table(table, batch).token_logprobs
    return -token_logprobs.mean() + ULD_WEIGHT * torch.stack(distances).mean()


class OnPolicy:
    """The losses of answers that the student samples, scored by the teacher's model."""

    def __init__(self, material: CrossTokenizerMaterial) -> None:
        self._teacher = material.teacher
        self._prompts = make_prompts(material.teacher_words, material.questions)
        self._aligner = material.reads_student
        student_vocabulary, teacher_vocabulary = (
            material.student_words.get_vocab(),
            material.teacher_words.get_vocab(),
        )
        shared_tokens = sorted(student_vocabulary.keys() & teacher_vocabulary.keys())
        self._student_ids = torch.tensor([student_vocabulary[token] for token in shared_tokens])
        self._teacher_ids = torch.tensor([teacher_vocabulary[token] for token in shared_tokens])
        self._matched_share = len(shared_tokens) / len(teacher_vocabulary)
        self._other_student_ids = _unmatched_ids(len(student_vocabulary), self._student_ids)
        self._other_teacher_ids = _unmatched_ids(
            material.teacher.config.vocab_size, self._teacher_ids
        )

    @torch.no_grad()
    def score_answers(
        self, written: Sequence[Rollout], numbers: Sequence[int]
    ) -> tuple[list[Rollout], list[Alignment], list[Tensor]]:
        """Return the answers that can be aligned, and the teacher's log-probs [T, V] of each."""
        alignments = [self._align(answer) for answer in written]
        aligned = [
            (answer, alignment, self._prompts[number])
            for answer, alignment, number in zip(written, alignments, numbers, strict=True)
            if alignment is not None and len(alignment.reader_ids)
        ]
        sequences = []
        for _, alignment, prompt in aligned:
            ids = np.concatenate([prompt.ids, alignment.reader_ids]).astype(np.int64)
            sequences.append(TokenSequence(torch.from_numpy(ids), len(prompt.ids)))
        states: Any = sequences  # `hidden_states` reads token ids and starts only
        table = compute_logits(self._teacher, hidden_states(self._teacher, states)).log_softmax(1)
        parts = table.split([sequence.learned for sequence in sequences])
        return (
            [answer for answer, _, _ in aligned],
            [alignment for _, alignment, _ in aligned],
            list(parts),
        )

    def word(self, student: Any, written: Sequence[Rollout], numbers: Sequence[int]) -> Tensor:
        """Return the mean over tokens of the loss of an on-policy job."""
        answers, alignments, tables = self.score_answers(written, numbers)
        scored = [
            ScoredSequence(answer, aligned_rows(answer, alignment, _teacher_rows(alignment, table)))
            for answer, alignment, table in zip(answers, alignments, tables, strict=True)
        ]
        batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
        rows = rows_of_table(student_logprobs(student, batch), batch)
        loss = CrossTokenizerObjective("word", 1.0).loss(batch)
        return loss(rows, slice(0, len(batch))).mean()

    def gold(
        self, student: Any, written: Sequence[Rollout], numbers: Sequence[int], *, even: bool
    ) -> Tensor:
        """Return GOLD's loss, the mean over answers. `even`: both weights are 1."""
        answers, alignments, tables = self.score_answers(written, numbers)
        logprobs = compute_logits(student, hidden_states(student, answers)).log_softmax(1)
        parts = logprobs.split([len(answer.completion) for answer in answers])
        weights = (1.0, 1.0) if even else (self._matched_share, 1 - self._matched_share)
        losses = []
        for answer, alignment, student_table, teacher_table in zip(
            answers, alignments, parts, tables, strict=True
        ):
            chunks = _text_chunks(alignment, ended=not answer.truncated)
            if not len(chunks):
                continue
            p = _merge_chunks(student_table, answer.completion, alignment.chunk, chunks)
            q = _merge_chunks(
                teacher_table,
                torch.from_numpy(alignment.reader_ids),
                alignment.reader_chunk,
                chunks,
            )
            matched = _generalised_jsd(p[:, self._student_ids], q[:, self._teacher_ids])
            unmatched = _sorted_distance(
                p[:, self._other_student_ids], q[:, self._other_teacher_ids]
            )
            losses.append((weights[0] * matched + weights[1] * unmatched) / len(chunks))
        return torch.stack(losses).mean()

    def string_cost(
        self, student: Any, written: Sequence[Rollout], numbers: Sequence[int]
    ) -> float:
        """Return the sum of log p - log q over the settled bytes of answers, per byte, in nats."""
        answers, alignments, tables = self.score_answers(written, numbers)
        cost = size = 0.0
        for answer, alignment, table in zip(answers, alignments, tables, strict=True):
            settled = alignment.read & alignment.settled
            cost += float(answer.token_logprobs.numpy()[settled].sum())
            cost -= float(
                _teacher_rows(alignment, table).token_logprobs[alignment.reader_settled].sum()
            )
            size += float(self._aligner.writer.lengths[answer.completion.numpy()[settled]].sum())
        return cost / size

    def _align(self, answer: Rollout) -> Alignment | None:
        return self._aligner.align(
            answer.completion.numpy().astype(np.int32), has_end=not answer.truncated
        )


def _teacher_rows(alignment: Alignment, table: Tensor) -> RowBlock:
    ids = torch.from_numpy(alignment.reader_ids.astype(np.int64))[:, None]
    token_logprobs = table.gather(1, ids)[:, 0].numpy()
    empty = np.zeros((len(token_logprobs), 1))
    return RowBlock(empty.astype(np.int32), empty.astype(np.float32), empty[:, 0], token_logprobs)


def _unmatched_ids(count: int, ids: Tensor) -> Tensor:
    is_unmatched = torch.ones(count, dtype=torch.bool)
    is_unmatched[ids] = False
    return is_unmatched.nonzero()[:, 0]


def _text_chunks(alignment: Alignment, *, ended: bool) -> np.ndarray:
    """Return the numbers of the chunks of both tokenizations, without the end of the answer."""
    shared_chunks: np.ndarray = np.intersect1d(
        alignment.chunk[alignment.read], alignment.reader_chunk
    )
    return shared_chunks[:-1] if ended and not alignment.stopped else shared_chunks


def _merge_chunks(table: Tensor, ids: Tensor, chunk: np.ndarray, chunks: np.ndarray) -> Tensor:
    """Return the distribution [C, V] of the last token of each chunk, times those before it."""
    token_logprobs = table.gather(1, ids.long()[:, None])[:, 0]
    last = torch.from_numpy(np.searchsorted(chunk, chunks, side="right") - 1)
    first = torch.from_numpy(np.searchsorted(chunk, chunks))
    sums = torch.cat([token_logprobs.new_zeros(1), token_logprobs.cumsum(0)])
    return (table[last] + (sums[last] - sums[first])[:, None]).exp()


def _generalised_jsd(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of the generalised JSD of matched ids, beta = 0.5."""
    log_p, log_q = (probabilities.clamp(min=SMALLEST).log() for probabilities in (p, q))
    middle = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    divergences = log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)
    return 0.5 * divergences.sum()


def _sorted_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of |p - q| of sorted probabilities; q beyond p's number has no gradient."""
    width = min(p.shape[1], q.shape[1])
    sorted_p, sorted_q = p.sort(1, descending=True).values, q.topk(width, 1).values
    return (sorted_p[:, :width] - sorted_q).abs().sum() + sorted_p[:, width:].abs().sum()
