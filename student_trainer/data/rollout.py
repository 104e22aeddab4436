"""An answer that the student sampled, with what the sampler recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from student_trainer.data.sequence import TokenSequence


@dataclass(frozen=True)
class Rollout(TokenSequence):
    """A prompt and one answer. Row i of the tensors here is about token `start + i`.

    head_ids [T - start, k] int64, the sampling policy's top-k; token_logprobs [T - start] float32,
    its log-prob of what it sampled; own [T - start] bool, None where all are: the student wrote it.
    What an environment wrote is read, never learned, and the rows of it mean nothing. On the CPU.
    """

    head_ids: Tensor
    token_logprobs: Tensor
    truncated: bool  # it was cut at max_new_tokens
    answer: str  # the reference
    teacher: str = ""  # the name of who is to score it, where there are several
    own: Tensor | None = None
    concluded: str | None = None  # what an environment took for the answer; None: all that is own
    queries: int = 0  # of the environment
    failed: bool = False  # the environment gave up: the student is not to blame
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the prompt
    text: str = ""  # of the prompt, as its data has it

    @property
    def places(self) -> Tensor:
        every = super().places
        return every if self.own is None else every[self.own]

    def answer_text(self, tokenizer: Any) -> str:
        """What is to be judged."""
        if self.concluded is not None:
            return self.concluded
        return str(tokenizer.decode(self.token_ids[self.places], skip_special_tokens=True))
