"""A token sequence for training: either stored or sampled (a rollout)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clients.data.tokens.tokenizer import answer_text
from protos.rows.codec import RowBlock
from student_trainer.data.images import SequenceImages


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of tokens, of which the tokens from index `start` on are learned.

    - token_ids [T] int64: on the CPU.
    - start: index of the first learned token, at least 1.
    - weight: factor of the loss of the sequence.
    - images: the images of the prompt; None without images.
    """

    token_ids: Tensor
    start: int
    weight: float = field(default=1.0, kw_only=True)
    images: SequenceImages | None = field(default=None, kw_only=True)

    @property
    def completion(self) -> Tensor:
        """The token ids from index `start` to the end, [T - start] int64."""
        return self.token_ids[self.start :]

    @property
    def places(self) -> Tensor:
        """Positions of the learned tokens in `token_ids`, [learned] int64, each at least `start`.

        The loss has one term for each learned token, and no term for other tokens.
        """
        return torch.arange(self.start, len(self.token_ids))

    @property
    def learned(self) -> int:
        """Number of learned tokens."""
        return len(self.places)

    def learned_rows(self, rows: RowBlock) -> RowBlock:
        """Return the rows of the learned tokens.

        `rows`: either the rows of all completion tokens, or already the rows of the learned tokens,
        which are returned unchanged.
        """
        if len(rows) == self.learned:
            return rows
        return rows.take((self.places - self.start).numpy())


@dataclass(frozen=True)
class MaskedSequence(TokenSequence):
    """A sequence of which only some tokens from index `start` on are learned.

    mask [T - start] bool: True for learned tokens.
    """

    mask: Tensor

    @property
    def places(self) -> Tensor:
        """Positions of the learned tokens in `token_ids`, [learned] int64."""
        return super().places[self.mask]


@dataclass(frozen=True)
class TailDraws:
    """M ids for each of L tokens. The sampling policy mu drew them from its tail, outside the head.

    - ids [L, M] int32: the drawn ids.
    - logprobs [L, M]: the log-prob in nats with which each id z was drawn: log mu(z) minus the log
      of mu's tail mass. +inf marks a placeholder that must be ignored: the tail was empty, or an
      environment wrote the token. float32 in a rollout.
    """

    ids: Tensor
    logprobs: Tensor

    def __getitem__(self, index: slice | Tensor) -> TailDraws:
        return TailDraws(self.ids[index], self.logprobs[index])

    @classmethod
    def joined(cls, parts: Sequence[TailDraws]) -> TailDraws:
        """Return the concatenation of `parts`, at least one."""
        return cls(
            torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts])
        )


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one sampled completion.

    The tensors are on the CPU. Index i of the following tensors belongs to token `start + i`:

    - head_ids [T - start, k] int32: the top-k ids of the sampling policy.
    - token_logprobs [T - start] float32: log-probs in nats of the tokens under the sampling policy.
    - own [T - start] bool: True for tokens that the student sampled; None if it sampled all. The
      other tokens were written by an environment. They are inputs of the model but are not learned,
      and their head ids and log-probs are placeholders.
    - draws: ids drawn from the tail, with L = T - start; None if the sampler drew none.
    """

    head_ids: Tensor
    token_logprobs: Tensor
    truncated: bool  # the completion reached max_new_tokens before an end
    answer: str  # the reference answer
    teacher: str = ""  # the name of its teacher, if the job has several
    own: Tensor | None = None
    draws: TailDraws | None = None
    concluded: str | None = None  # the answer that the environment extracted; None: all own tokens
    queries: int = 0  # number of queries to the environment
    failed: bool = False  # the environment failed, not the student
    fields: Mapping[str, Any] = field(default_factory=dict)  # the record of the prompt
    text: str = ""  # the text of the prompt, before the template is applied
    # (weights version, number of tokens sampled with it) in order; empty: the trainer sampled.
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the tokens that the student sampled, [learned] int64."""
        positions = super().places
        return positions if self.own is None else positions[self.own]

    def answer_text(self, tokenizer: Any) -> str:
        """Return the text of the answer, for rewards and evaluations."""
        if self.concluded is not None:
            return self.concluded
        ids = self.token_ids[self.places].tolist()
        return answer_text(tokenizer, ids, has_end=not self.truncated)
