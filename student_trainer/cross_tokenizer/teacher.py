"""A teacher service with another tokenizer, as a TeacherSource.

The teacher reads its own tokens: the prompt in its own chat template, and its own encoding of the
answer's text. Its log-probs of these tokens are divided among the student's tokens
(`cross_tokenizer/losses.py`) and returned as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clients.cross_tokenizer.alignment import Aligner, Alignment
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.aligned_rows import AlignedRows
from student_trainer.data.sequence import Rollout
from student_trainer.teachers.remote import map_future
from student_trainer.teachers.source import resolved

# In nats, added to the cost of a word whose tokens differ from the student tokenizer's: at the
# minimum, such spellings then have e^-5 of the probability (`cross_tokenizer/losses.py`).
OTHER_SPELLING = 5.0
# Log-prob of a token without a counterpart in the teacher: a special token inside an answer.
IMPOSSIBLE = -20.0


class CrossTokenizerTeacher:
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
    ) -> None:
        """Store the settings of the requests.

        - prompt: a function that returns the prompt ids [P] that the teacher reads for a rollout.
        - temperature: divides the teacher's logits.
        - max_length: maximum number of tokens that the teacher reads. Longer answers are not
          learned.
        """
        self._client = client
        self._aligner = aligner
        self._prompt = prompt
        self._temperature = temperature
        self._max_length = max_length

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows of the completion without blocking; see `RemoteTeacher.score`."""
        ids = rollout.completion.numpy().astype(np.int32)
        alignment = self._aligner.align(ids, has_end=not rollout.truncated)
        prompt_ids = self._prompt(rollout).numpy().astype(np.int32)
        if alignment is None or len(prompt_ids) + len(alignment.reader_ids) > self._max_length:
            return resolved(_skipped_rows(rollout))
        query = ScoreQuery(
            token_ids=np.concatenate([prompt_ids, alignment.reader_ids]),
            start=len(prompt_ids),
            top_k=1,  # only the log-probs of the tokens are read
            temperature=self._temperature,
        )
        return map_future(self._client.submit(query), partial(aligned_rows, rollout, alignment))

    def finish(self) -> None:
        """Do nothing, because the service answers each request separately."""


def aligned_rows(rollout: Rollout, alignment: Alignment, rows: RowBlock) -> AlignedRows:
    """Return the rows of the student's tokens of a rollout.

    `rows`: one row for each of the teacher's tokens.
    """
    logprobs = np.where(alignment.reader_settled, rows.token_logprobs, 0.0)
    learned = alignment.read & alignment.settled
    begins = np.append(True, alignment.word[1:] != alignment.word[:-1])
    words = int(alignment.word[-1]) + 1
    word_logprobs = np.bincount(alignment.reader_word, weights=logprobs, minlength=words)
    is_other_spelling = learned & ~alignment.canonical
    has_other_spelling = np.bincount(alignment.word, weights=is_other_spelling, minlength=words) > 0
    shares = np.where(
        begins, (word_logprobs - OTHER_SPELLING * has_other_spelling)[alignment.word], 0.0
    )
    if alignment.stopped:
        stop_position = int(alignment.read.sum())
        shares[stop_position], learned[stop_position] = IMPOSSIBLE, True
    is_canonical = not (alignment.read & ~alignment.canonical).any()
    word = np.cumsum(begins) - 1
    return _build_rows(rollout, shares, word, learned, alignment.one_to_one, spelled=is_canonical)


def _skipped_rows(rollout: Rollout) -> AlignedRows:
    no_tokens = np.zeros(len(rollout.completion), np.bool_)
    return _build_rows(
        rollout,
        no_tokens.astype(float),
        no_tokens.astype(np.int64),
        no_tokens,
        no_tokens,
        spelled=False,
    )


def _build_rows(
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
