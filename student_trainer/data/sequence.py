"""A token sequence for training, stored or sampled (a rollout)."""

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
    """token_ids [T] int64 on the CPU; the tokens from index `start` (at least 1) on are learned.

    weight: multiplies the loss of the sequence. images: the images of the prompt; None without
    images.
    """

    token_ids: Tensor
    start: int
    weight: float = field(default=1.0, kw_only=True)
    images: SequenceImages | None = field(default=None, kw_only=True)

    @property
    def completion(self) -> Tensor:
        """The token ids from `start` on, [T - start] int64."""
        return self.token_ids[self.start :]

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the learned tokens, [learned] int64, at least `start`.

        The loss has a term for each learned token, and none for other tokens.
        """
        return torch.arange(self.start, len(self.token_ids))

    @property
    def learned(self) -> int:
        """Number of learned tokens."""
        return len(self.places)

    def learned_rows(self, rows: RowBlock) -> RowBlock:
        """Return the rows of the learned tokens.

        `rows`: rows of the whole completion, or only of the learned tokens; the latter are returned
        unchanged.
        """
        if len(rows) == self.learned:
            return rows
        return rows.take((self.places - self.start).numpy())


@dataclass(frozen=True)
class MaskedSequence(TokenSequence):
    """A sequence of which only some tokens from `start` on are learned; mask [T - start] bool."""

    mask: Tensor

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the learned tokens, [learned] int64."""
        return super().places[self.mask]


@dataclass(frozen=True)
class TailDraws:
    """M ids for each of L tokens, drawn by the sampling policy mu from its tail, outside the head.

    ids [L, M] int32. logprobs [L, M]: log-prob in nats with which each id was drawn, log mu(z)
    minus the log of mu's tail mass; +inf: a placeholder, to be ignored, because the tail was empty
    or an environment wrote the token. float32 in a rollout.
    """

    ids: Tensor
    logprobs: Tensor

    def __getitem__(self, index: slice | Tensor) -> TailDraws:
        return TailDraws(self.ids[index], self.logprobs[index])

    @classmethod
    def joined(cls, parts: Sequence[TailDraws]) -> TailDraws:
        """Concatenate the draws of at least one part."""
        return cls(
            torch.cat([part.ids for part in parts]), torch.cat([part.logprobs for part in parts])
        )


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one sampled completion. Index i of its tensors is token `start + i`; on the CPU.

    - head_ids [T - start, k] int32: the top-k ids of the sampling policy.
    - token_logprobs [T - start] float32: its log-probs of the tokens, in nats.
    - own [T - start] bool: True for tokens that the student sampled; None if it sampled all. Tokens
      that an environment wrote are inputs but are not learned; their head ids and log-probs are
      placeholders.
    - draws: L = T - start; None if the sampler drew none.
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
