"""Samples multi-turn rollouts: the student writes queries, reads passages, and answers.

The format is that of Search-R1 (arXiv 2503.09516). After `<search>` query `</search>` the
environment adds passages between `<information>` and `</information>`. `<answer>` ... `</answer>`
ends the rollout.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clients.config.tables.environment import SearchConfig
from clients.data.tokens.continuation import continuation_ids
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.environments.retriever import Retriever, format_passages
from student_trainer.rollouts.rollouts import batches
from student_trainer.rollouts.sampler import Marks, SampledTokens, Sampler, rollout_noise

# Texts that end a turn.
MARKS = ("</search>", "</answer>")

_ACTION = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class SearchTurn:
    """The inputs for sampling one turn of a conversation.

    - token_ids [T] int64: the conversation so far.
    - number: the rollout number.
    - limit: maximum number of tokens to sample.
    - used: number of random numbers that earlier turns of the rollout have used.
    """

    token_ids: Tensor
    number: int
    limit: int
    used: int


# Samples turns until an end token, one of MARKS or their limit: in this process or at an engine.
SampleTurns = Callable[[Sequence[SearchTurn]], list[SampledTokens]]


class SearchConversations:
    """Conversations of the student with a retriever; thread-safe.

    A turn continues from the token ids of earlier turns. Decoding and encoding these ids again
    could change them.
    """

    def __init__(
        self,
        tokenizer: Any,
        retriever: Retriever,
        config: SearchConfig,
        *,
        max_new_tokens: int,
        batch_tokens: int | None,
    ) -> None:
        """Set up the conversations.

        - max_new_tokens: maximum tokens of all turns of a rollout together, including the passages.
        - batch_tokens: maximum tokens of a batch, including padding; None: one batch. The
          conversations of a batch are sampled together, turn by turn.
        """
        # A copy, with a lock, because a call that splits special tokens changes the tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._retriever = retriever
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._batch_tokens = batch_tokens
        self._opening = self._encode("\n\n<information>")
        self._closing = self._encode("</information>\n\n")

    def sample(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], sample_turns: SampleTurns
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield (index of the prompt, its rollout) when a conversation ends, batch by batch."""
        for batch in self.batches(prompts):
            numbered_prompts = zip(prompts[batch], numbers[batch], strict=True)
            conversations = [
                _Conversation(*pair, index)
                for index, pair in enumerate(numbered_prompts, batch.start)
            ]
            while conversations:
                self._sample_turn(conversations, sample_turns)
                yield from (
                    (conversation.index, conversation.rollout())
                    for conversation in conversations
                    if conversation.has_ended
                )
                conversations = [
                    conversation for conversation in conversations if not conversation.has_ended
                ]

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[slice]:
        """Yield slices of prompts. The conversations of a slice are sampled together."""
        if self._batch_tokens is None:
            return iter([slice(0, len(prompts))] if prompts else [])
        lengths = [len(prompt.ids) for prompt in prompts]
        return batches(lengths, self._max_new_tokens, self._batch_tokens)

    def _sample_turn(
        self, conversations: Sequence[_Conversation], sample_turns: SampleTurns
    ) -> None:
        """Sample one turn of each conversation, and add passages for each query.

        A conversation whose turn has no query ends.
        """
        turns = sample_turns(
            [conversation.turn(self._max_new_tokens) for conversation in conversations]
        )
        pending_queries: list[tuple[_Conversation, str]] = []
        for conversation, turn in zip(conversations, turns, strict=True):
            conversation.add_turn(turn)
            query = self._read_query(conversation, turn)
            if query is not None:
                pending_queries.append((conversation, query))
        if pending_queries:
            retrieved = self._retriever.passages(
                [query for _, query in pending_queries], self._config.passages
            )
            for (conversation, _), passages in zip(pending_queries, retrieved, strict=True):
                self._add_passages(conversation, passages)

    def _read_query(self, conversation: _Conversation, turn: SampledTokens) -> str | None:
        """Return the query of a turn, or None if the conversation ends with this turn.

        The conversation ends if the turn has no query, or if `max_turns` queries were already
        answered.
        """
        with self._lock:
            text = self._tokenizer.decode(turn.token_ids, clean_up_tokenization_spaces=False)
        kind, content = parse_action(text) if turn.closed else (None, "")
        if kind == "search" and conversation.queries < self._config.max_turns:
            conversation.queries += 1
            return content
        conversation.has_ended = True
        conversation.concluded = content if kind == "answer" else ""
        conversation.truncated = not (turn.closed or turn.ended)
        return None

    def _add_passages(self, conversation: _Conversation, passages: Sequence[str] | None) -> None:
        if passages is None:
            conversation.has_ended = conversation.failed = True
            return
        # split_special_tokens: a passage must not contain a token that ends an answer.
        passage_ids = self._encode(format_passages(passages), split_special_tokens=True)
        passage_ids = passage_ids[: self._config.max_passage_tokens]
        information = torch.cat([self._opening, passage_ids, self._closing])
        if conversation.length + len(information) < self._max_new_tokens:
            conversation.add_passages(information)
        else:  # no room for the passages and one more token
            conversation.has_ended = conversation.truncated = True

    def _encode(self, text: str, *, split_special_tokens: bool = False) -> Tensor:
        with self._lock:
            ids = continuation_ids(self._tokenizer, text, split_special_tokens=split_special_tokens)
        return torch.tensor(ids, dtype=torch.long)


class SearchRollouts:
    """Samples multi-turn rollouts in this process."""

    in_process = True

    def __init__(
        self,
        conversations: SearchConversations,
        sampler: Sampler,
        tokenizer: Any,
        *,
        stream_tokens: int,
    ) -> None:
        """Set up the rollouts. This decodes each token of the vocabulary once.

        `stream_tokens`: the number of random numbers per rollout, equal to `max_new_tokens` of
        `conversations`.
        """
        self._conversations = conversations
        self._sampler = sampler
        self._stream_tokens = stream_tokens
        self._marks = Marks(tokenizer, MARKS)

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `Rollouts.generate`."""

        def sample_turns(turns: Sequence[SearchTurn]) -> list[SampledTokens]:
            return self._sample_turns(turns, None if greedy else seed)

        for batch in self._conversations.batches(prompts):
            indexed_rollouts = self._conversations.sample(
                prompts[batch], numbers[batch], sample_turns
            )
            yield [rollout for _, rollout in sorted(indexed_rollouts, key=lambda pair: pair[0])]

    def _sample_turns(self, turns: Sequence[SearchTurn], seed: int | None) -> list[SampledTokens]:
        noise = draw_noise = None
        if seed is not None:
            noise = [self._noise(turn, seed, draws=False) for turn in turns]
            draw_noise = [self._noise(turn, seed, draws=True) for turn in turns]
        return self._sampler.write(
            [turn.token_ids for turn in turns],
            [turn.limit for turn in turns],
            noise,
            self._marks,
            draw_noise,
        )

    def _noise(self, turn: SearchTurn, seed: int, *, draws: bool) -> Tensor:
        stream = rollout_noise(turn.number, seed, self._stream_tokens, draws=draws)
        return stream[turn.used : turn.used + turn.limit]


def parse_action(turn: str) -> tuple[str | None, str]:
    """Return the action in a turn: ("search", query), ("answer", answer) or (None, "")."""
    match = _ACTION.search(turn)
    return (match[1], match[2].strip()) if match else (None, "")


@dataclass(eq=False)
class _Conversation:
    """The conversation of one rollout while it is sampled. `index`: the index of its prompt."""

    prompt: Prompt
    number: int
    index: int
    parts: list[Tensor] = field(default_factory=list)  # turns and passages, in order
    heads: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    draws: list[TailDraws] = field(default_factory=list)  # empty if the sampler draws none
    own_masks: list[Tensor] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    queries: int = 0
    has_ended: bool = False
    truncated: bool = False
    failed: bool = False
    concluded: str = ""

    @property
    def tokens(self) -> Tensor:
        return torch.cat([torch.from_numpy(self.prompt.ids).long(), *self.parts])

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(map(len, self.parts))

    def turn(self, max_tokens: int) -> SearchTurn:
        """Return the inputs of the next turn. `max_tokens`: maximum tokens after the prompt."""
        used_numbers = sum(
            int(own_mask.sum()) for own_mask in self.own_masks
        )  # one for each sampled token
        return SearchTurn(self.tokens, self.number, max_tokens - self.length, used_numbers)

    def add_turn(self, turn: SampledTokens) -> None:
        self.parts.append(turn.token_ids)
        self.heads.append(turn.head_ids)
        self.logprobs.append(turn.token_logprobs)
        if turn.draws is not None:
            self.draws.append(turn.draws)
        self.own_masks.append(torch.ones(len(turn.token_ids), dtype=torch.bool))
        self.versions += turn.versions

    def add_passages(self, information: Tensor) -> None:
        """Add passages to the conversation. Their head ids, log-probs and draws are placeholders.

        The head ids of a placeholder row are distinct, because a teacher requires this.
        """
        head_size = self.heads[0].shape[1]
        self.parts.append(information)
        self.heads.append(torch.arange(head_size, dtype=torch.int32).repeat(len(information), 1))
        self.logprobs.append(torch.zeros(len(information)))
        if self.draws:
            ids = self.draws[0].ids.new_zeros(len(information), self.draws[0].ids.shape[1])
            self.draws.append(TailDraws(ids, torch.full(ids.shape, torch.inf)))
        self.own_masks.append(torch.zeros(len(information), dtype=torch.bool))

    def rollout(self) -> Rollout:
        return Rollout(
            token_ids=self.tokens,
            start=len(self.prompt.ids),
            head_ids=torch.cat(self.heads),
            token_logprobs=torch.cat(self.logprobs),
            truncated=self.truncated,
            answer=self.prompt.answer,
            teacher=self.prompt.teacher,
            own=torch.cat(self.own_masks),
            draws=TailDraws.joined(self.draws) if self.draws else None,
            concluded=self.concluded,
            queries=self.queries,
            failed=self.failed,
            fields=self.prompt.fields,
            text=self.prompt.text,
            versions=tuple(self.versions),
        )
