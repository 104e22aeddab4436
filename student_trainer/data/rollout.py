"""A rollout: a prompt with a sampled completion and the records of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from student_trainer.data.sequence import TokenSequence


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one sampled completion. Index i of its tensors is token `start + i`; on the CPU.

    head_ids [T - start, k] int64: the top-k ids of the sampling policy. token_logprobs [T - start]
    float32: its log-probs of the tokens, in nats. own [T - start] bool: True for tokens that the
    student sampled; None if it sampled all. Tokens that an environment wrote are read but not
    learned, and their head ids and log-probs are placeholders.
    """

    head_ids: Tensor
    token_logprobs: Tensor
    truncated: bool  # the completion reached max_new_tokens before an end
    answer: str  # the reference answer
    teacher: str = ""  # the name of its teacher, if the job has several
    own: Tensor | None = None
    concluded: str | None = None  # the answer according to an environment; None: all own tokens
    queries: int = 0  # number of queries to the environment
    failed: bool = False  # the environment failed, not the student
    fields: Mapping[str, Any] = field(default_factory=dict)  # the record of the prompt
    text: str = ""  # of the prompt, before the template

    @property
    def places(self) -> Tensor:
        """Positions in `token_ids` of the tokens that the student sampled, [learned] int64."""
        every = super().places
        return every if self.own is None else every[self.own]

    def answer_text(self, tokenizer: Any) -> str:
        """Return the text of the answer, which rewards and evaluations judge."""
        if self.concluded is not None:
            return self.concluded
        return str(tokenizer.decode(self.token_ids[self.places], skip_special_tokens=True))
