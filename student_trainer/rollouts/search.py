"""Multi-turn rollouts: the student writes queries, reads the passages found, and answers.

After Search-R1 (arXiv 2503.09516): after `<search>` query `</search>` the environment writes
passages between `<information>` and `</information>`; `<answer>` ... `</answer>` ends the rollout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clients.config.tables.environment import SearchConfig
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout, TailDraws
from student_trainer.environments.retriever import Retriever, as_text
from student_trainer.rollouts.hf import batches
from student_trainer.rollouts.sampler import Marks, SampledTokens, Sampler, noise_of

_ACTION = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)


class SearchRollouts:
    """Samples multi-turn rollouts; each is fixed by its rollout number, the seed and the passages.

    A turn continues from the token ids of the turns before it. They are never decoded and tokenized
    again, which could change them.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Any,
        retriever: Retriever,
        config: SearchConfig,
        *,
        max_new_tokens: int,
        batch_tokens: int,
    ) -> None:
        """Set up the sampler. Decodes each token of the vocabulary once.

        `max_new_tokens`: limit of all turns of a rollout together, with the passages.
        `batch_tokens`: tokens of a batch at most, with padding.
        """
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._retriever = retriever
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._batch_tokens = batch_tokens
        self._marks = Marks(tokenizer, ["</search>", "</answer>"])
        self._opening = self._ids("\n\n<information>")
        self._closing = self._ids("</information>\n\n")

    def generate(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], *, seed: int, greedy: bool = False
    ) -> Iterator[list[Rollout]]:
        """Yield one rollout per prompt; see `Rollouts.generate`."""
        most = self._max_new_tokens
        for part in batches([len(p.ids) for p in prompts], most, self._batch_tokens):
            noise = [
                None if greedy else (noise_of(n, seed, most), noise_of(n, seed, most, draws=True))
                for n in numbers[part]
            ]
            talks = [_Talk(*pair) for pair in zip(prompts[part], noise, strict=True)]
            while going_on := [talk for talk in talks if not talk.over]:
                self._turn(going_on)
            yield [talk.rollout() for talk in talks]

    def _turn(self, talks: Sequence[_Talk]) -> None:
        """Sample one turn of each conversation; add passages for queries, finish the others."""
        limits = [self._max_new_tokens - talk.length for talk in talks]
        noise = [talk.noise_left(limit) for talk, limit in zip(talks, limits, strict=True)]
        given = [pair for pair in noise if pair is not None]
        written = self._sampler.write(
            [talk.tokens for talk in talks],
            limits,
            [of_tokens for of_tokens, _ in given] or None,
            self._marks,
            [of_draws for _, of_draws in given] or None,
        )
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
        body = self._ids(as_text(passages), split_special_tokens=True)
        body = body[: self._config.max_passage_tokens]
        information = torch.cat([self._opening, body, self._closing])
        if talk.length + len(information) < self._max_new_tokens:
            talk.read(information)
        else:  # no room for the passages and one more token
            talk.over = talk.truncated = True

    def _ids(self, text: str, **options: bool) -> Tensor:
        ids = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)


def action(turn: str) -> tuple[str | None, str]:
    """Return how a turn ends: ("search", query), ("answer", answer) or (None, "")."""
    found = _ACTION.search(turn)
    return (found[1], found[2].strip()) if found else (None, "")


@dataclass(eq=False)
class _Talk:
    """The conversation of one rollout while it is sampled.

    noise: its random numbers, [max_new_tokens] float64, for tokens and for draws; None: greedy.
    """

    prompt: Prompt
    noise: tuple[Tensor, Tensor] | None
    parts: list[Tensor] = field(default_factory=list)  # turns and passages, in order
    heads: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    draws: list[TailDraws] = field(default_factory=list)  # empty if the sampler draws none
    own: list[Tensor] = field(default_factory=list)
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

    def noise_left(self, limit: int) -> tuple[Tensor, Tensor] | None:
        """Return the next `limit` random numbers of each kind; a sampled token uses one of each."""
        if self.noise is None:
            return None
        used = sum(int(part.sum()) for part in self.own)
        of_tokens, of_draws = self.noise
        return of_tokens[used : used + limit], of_draws[used : used + limit]

    def add(self, turn: SampledTokens) -> None:
        self.parts.append(turn.token_ids)
        self.heads.append(turn.head_ids)
        self.logprobs.append(turn.token_logprobs)
        if turn.draws is not None:
            self.draws.append(turn.draws)
        self.own.append(torch.ones(len(turn.token_ids), dtype=torch.bool))

    def read(self, information: Tensor) -> None:
        """Add passages. Their head ids, log-probs and draws are placeholders.

        The head ids of a row must be distinct: a teacher checks that.
        """
        k = self.heads[0].shape[1]
        self.parts.append(information)
        self.heads.append(torch.arange(k).repeat(len(information), 1))
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
        )
