"""Multi-turn rollouts: the student writes queries, reads the passages found, and answers.

After Search-R1 (arXiv 2503.09516): after `<search>` query `</search>` the environment writes
passages between `<information>` and `</information>`; `<answer>` ... `</answer>` ends the rollout.
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
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout, TailDraws
from student_trainer.environments.retriever import Retriever, format_passages
from student_trainer.rollouts.hf import batches
from student_trainer.rollouts.sampler import Marks, SampledTokens, Sampler, noise_of

# Texts that end a turn.
MARKS = ("</search>", "</answer>")

_ACTION = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """A turn to sample.

    token_ids [T] int64: the conversation so far. number: the rollout number. limit: most tokens to
    sample. used: random numbers of the rollout that its earlier turns have used.
    """

    token_ids: Tensor
    number: int
    limit: int
    used: int


# Samples turns until an end token, one of MARKS or their limit: in this process or at an engine.
SampleTurns = Callable[[Sequence[Turn]], list[SampledTokens]]


class SearchConversations:
    """Conversations of the student with a retriever; thread-safe.

    A turn continues from the token ids of the turns before it. They are never decoded and tokenized
    again, which could change them.
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
        """`max_new_tokens`: limit of all turns of a rollout together, with the passages.

        `batch_tokens`: tokens of a batch at most, with padding; None: one batch. The conversations
        of a batch take their turns together.
        """
        # A copy, with a lock: a call that splits special tokens changes the tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._retriever = retriever
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._batch_tokens = batch_tokens
        self._opening = self._ids("\n\n<information>")
        self._closing = self._ids("</information>\n\n")

    def sample(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], sample_turns: SampleTurns
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield (index of the prompt, its rollout) as the conversations end, batch by batch."""
        for part in self.batches(prompts):
            pairs = zip(prompts[part], numbers[part], strict=True)
            talks = [_Talk(*pair, place) for place, pair in enumerate(pairs, part.start)]
            while talks:
                self._turn(talks, sample_turns)
                yield from ((talk.index, talk.rollout()) for talk in talks if talk.over)
                talks = [talk for talk in talks if not talk.over]

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[slice]:
        """Yield the slices of the prompts whose conversations take their turns together."""
        if self._batch_tokens is None:
            return iter([slice(0, len(prompts))] if prompts else [])
        lengths = [len(prompt.ids) for prompt in prompts]
        return batches(lengths, self._max_new_tokens, self._batch_tokens)

    def _turn(self, talks: Sequence[_Talk], sample_turns: SampleTurns) -> None:
        """Sample one turn of each conversation; add passages for queries, finish the others."""
        written = sample_turns([talk.turn(self._max_new_tokens) for talk in talks])
        asking: list[tuple[_Talk, str]] = []
        for talk, turn in zip(talks, written, strict=True):
            talk.add(turn)
            query = self._heard(talk, turn)
            if query is not None:
                asking.append((talk, query))
        if asking:
            found = self._retriever.passages([q for _, q in asking], self._config.passages)
            for (talk, _), passages in zip(asking, found, strict=True):
                self._answer(talk, passages)

    def _heard(self, talk: _Talk, turn: SampledTokens) -> str | None:
        """Return the query of a turn, or None at the end of the conversation.

        The conversation ends if the turn has no query, or if `max_turns` queries have been
        answered.
        """
        with self._lock:
            text = self._tokenizer.decode(turn.token_ids, clean_up_tokenization_spaces=False)
        asked, query = action(text) if turn.closed else (None, "")
        if asked == "search" and talk.queries < self._config.max_turns:
            talk.queries += 1
            return query
        talk.over = True
        talk.concluded = query if asked == "answer" else ""
        talk.truncated = not (turn.closed or turn.ended)
        return None

    def _answer(self, talk: _Talk, passages: Sequence[str] | None) -> None:
        if passages is None:
            talk.over = talk.failed = True
            return
        # split_special_tokens: a passage must not contain a token that ends an answer.
        body = self._ids(format_passages(passages), split_special_tokens=True)
        body = body[: self._config.max_passage_tokens]
        information = torch.cat([self._opening, body, self._closing])
        if talk.length + len(information) < self._max_new_tokens:
            talk.read(information)
        else:  # no room for the passages and one more token
            talk.over = talk.truncated = True

    def _ids(self, text: str, **options: bool) -> Tensor:
        with self._lock:
            ids = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
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
        """Keep the parts. Decodes each token of the vocabulary once.

        `stream_tokens`: random numbers of a rollout, `max_new_tokens` of the conversations.
        """
        self._conversations = conversations
        self._sampler = sampler
        self._stream_tokens = stream_tokens
        self._marks = Marks(tokenizer, MARKS)

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `Rollouts.generate`."""

        def sample_turns(turns: Sequence[Turn]) -> list[SampledTokens]:
            return self._sampled(turns, None if greedy else seed)

        for part in self._conversations.batches(prompts):
            found = self._conversations.sample(prompts[part], numbers[part], sample_turns)
            yield [rollout for _, rollout in sorted(found, key=lambda pair: pair[0])]

    def _sampled(self, turns: Sequence[Turn], seed: int | None) -> list[SampledTokens]:
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

    def _noise(self, turn: Turn, seed: int, *, draws: bool) -> Tensor:
        stream = noise_of(turn.number, seed, self._stream_tokens, draws=draws)
        return stream[turn.used : turn.used + turn.limit]


def action(turn: str) -> tuple[str | None, str]:
    """Return how a turn ends: ("search", query), ("answer", answer) or (None, "")."""
    found = _ACTION.search(turn)
    return (found[1], found[2].strip()) if found else (None, "")


@dataclass(eq=False)
class _Talk:
    """The conversation of one rollout while it is sampled. index: of its prompt."""

    prompt: Prompt
    number: int
    index: int
    parts: list[Tensor] = field(default_factory=list)  # turns and passages, in order
    heads: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    draws: list[TailDraws] = field(default_factory=list)  # empty if the sampler draws none
    own: list[Tensor] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    queries: int = 0
    over: bool = False
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

    def turn(self, most: int) -> Turn:
        """Return the next turn, of a conversation with at most `most` tokens after the prompt."""
        used = sum(int(part.sum()) for part in self.own)  # one for each sampled token
        return Turn(self.tokens, self.number, most - self.length, used)

    def add(self, turn: SampledTokens) -> None:
        self.parts.append(turn.token_ids)
        self.heads.append(turn.head_ids)
        self.logprobs.append(turn.token_logprobs)
        if turn.draws is not None:
            self.draws.append(turn.draws)
        self.own.append(torch.ones(len(turn.token_ids), dtype=torch.bool))
        self.versions += turn.versions

    def read(self, information: Tensor) -> None:
        """Add passages. Their head ids, log-probs and draws are placeholders.

        The head ids of a row must be distinct: a teacher checks that.
        """
        k = self.heads[0].shape[1]
        self.parts.append(information)
        self.heads.append(torch.arange(k, dtype=torch.int32).repeat(len(information), 1))
        self.logprobs.append(torch.zeros(len(information)))
        if self.draws:
            ids = self.draws[0].ids.new_zeros(len(information), self.draws[0].ids.shape[1])
            self.draws.append(TailDraws(ids, torch.full(ids.shape, torch.inf)))
        self.own.append(torch.zeros(len(information), dtype=torch.bool))

    def rollout(self) -> Rollout:
        return Rollout(
            token_ids=self.tokens,
            start=len(self.prompt.ids),
            head_ids=torch.cat(self.heads),
            token_logprobs=torch.cat(self.logprobs),
            truncated=self.truncated,
            answer=self.prompt.answer,
            teacher=self.prompt.teacher,
            own=torch.cat(self.own),
            draws=TailDraws.joined(self.draws) if self.draws else None,
            concluded=self.concluded,
            queries=self.queries,
            failed=self.failed,
            fields=self.prompt.fields,
            text=self.prompt.text,
            versions=tuple(self.versions),
        )
