"""A teacher service with another tokenizer as a TeacherSource.

The teacher reads its own tokens: the prompt in its own chat template, and its encoding of the
answer's text. Its log-probs of these tokens become shares of the student's tokens
(`losses/cross_tokenizer.py`), which come back as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clients.alignment.alignment import Aligner, Alignment
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.data.aligned import AlignedRows
from student_trainer.data.rollout import Rollout
from student_trainer.teachers.matched_heads import HeadMap, MatchedHeads
from student_trainer.teachers.remote import mapped
from student_trainer.teachers.source import resolved

# In nats, added to the cost of a word with another spelling than the student's tokenizer has: at
# the minimum, such spellings then have e^-5 of the probability (`losses/cross_tokenizer.py`).
OTHER_SPELLING = 5.0
# Log-prob of a token that no teacher token can stand for: a special token inside an answer.
IMPOSSIBLE = -20.0


class OtherTokenizerTeacher:
    """Requests the teacher's log-probs of its own tokens, and returns AlignedRows."""

    any_time = True

    def __init__(
        self,
        client: TeacherClient,
        aligner: Aligner,
        prompt: Callable[[Rollout], Tensor],
        *,
        temperature: float,
        max_length: int,
        heads: HeadMap | None = None,
    ) -> None:
        """Keep the settings of the requests.

        `prompt`: returns the prompt ids [P] that the teacher reads for a rollout. `temperature`:
        divides the teacher's logits. `max_length`: the most tokens that the teacher reads; longer
        answers are left out. `heads`: ask for the student's head ids too, for the control variate;
        None: only the log-probs of tokens are read.
        """
        self._client = client
        self._aligner = aligner
        self._prompt = prompt
        self._temperature = temperature
        self._max_length = max_length
        self._heads = heads

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows of the completion; never blocks. Otherwise as `RemoteTeacher.score`."""
        ids = rollout.completion.numpy().astype(np.int32)
        found = self._aligner.align(ids, ended=not rollout.truncated)
        before = self._prompt(rollout).numpy().astype(np.int32)
        if found is None or len(before) + len(found.reader_ids) > self._max_length:
            return resolved(_left_out(rollout, matched=self._heads is not None))
        query = ScoreQuery(
            token_ids=np.concatenate([before, found.reader_ids]),
            start=len(before),
            top_k=1,  # only the log-probs of the tokens are read
            temperature=self._temperature,
        )
        heads = None
        if self._heads is not None:
            heads = self._heads.match(ids, rollout.head_ids.numpy(), found)
            # As draws, because those of a row may be equal; a head of one id is asked for beside.
            asked = heads.of_teacher(query.rows)
            query = replace(query, top_k=None, head_ids=asked[:, :1], draw_ids=asked)
        return mapped(self._client.submit(query), partial(aligned_rows, rollout, found, heads))

    def finish(self) -> None:
        """Do nothing: the service answers each request on its own."""


def aligned_rows(
    rollout: Rollout, found: Alignment, heads: MatchedHeads | None, rows: RowBlock
) -> AlignedRows:
    """Return the rows of a rollout. `rows`: of the teacher's tokens, one for each.

    `heads`: if the rows have draws, those that `MatchedHeads.of_teacher` asks for.
    """
    logprobs = np.where(found.reader_settled, rows.token_logprobs, 0.0)
    learned = found.read & found.settled
    begins = np.append(True, found.word[1:] != found.word[:-1])
    words = int(found.word[-1]) + 1
    of_word = np.bincount(found.reader_word, weights=logprobs, minlength=words)
    other = learned & ~found.canonical
    others = np.bincount(found.word, weights=other, minlength=words) > 0
    shares = np.where(begins, (of_word - OTHER_SPELLING * others)[found.word], 0.0)
    if found.stopped:
        at = int(found.read.sum())
        shares[at], learned[at] = IMPOSSIBLE, True
    spelled = not (found.read & ~found.canonical).any()
    word = np.cumsum(begins) - 1
    made = _rows(rollout, shares, word, learned, found.one_to_one, spelled=spelled)
    if heads is None:
        return made
    assert rows.draw_logprobs is not None, "they were asked for"
    logprobs = np.where(heads.matched, rows.draw_logprobs[heads.place], 0)
    return replace(made, head_logprobs=logprobs.astype(np.float32), matched=heads.matched)


def _left_out(rollout: Rollout, *, matched: bool) -> AlignedRows:
    none = np.zeros(len(rollout.completion), np.bool_)
    rows = _rows(rollout, none.astype(float), none.astype(np.int64), none, none, spelled=False)
    if not matched:
        return rows
    return replace(rows, matched=np.zeros(rollout.head_ids.shape, np.bool_))


def _rows(
    rollout: Rollout,
    shares: NDArray[np.float64],
    word: NDArray[np.int64],
    learned: NDArray[np.bool_],
    one_to_one: NDArray[np.bool_],
    *,
    spelled: bool,
) -> AlignedRows:
    head = rollout.head_ids.numpy()
    return AlignedRows(
        head_ids=head,
        head_logprobs=np.zeros(head.shape, np.float32),
        tail_logmass=np.zeros(len(head), np.float32),
        token_logprobs=shares.astype(np.float32),
        word=word,
        learned=learned,
        one_to_one=one_to_one,
        spelled=spelled,
    )
