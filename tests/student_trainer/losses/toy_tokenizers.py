"""Every answer over an alphabet of two, of at most 5 bytes, with a student and teachers.

The alphabet is {a, b}, or {a, " "} for words.

Probabilities are tables: random logits for every prefix of tokens. So each expectation is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

LONGEST = 5
END = ""
STUDENT = ("a", "b", "ab", "ba")
# Of words: no token goes on from one word into the next.
STUDENT_OF_WORDS = ("a", " ", "aa", " a")
TEACHER_OF_WORDS = ("a", " ", "aaa", " aa")

Tokens = tuple[str, ...]
Encode = Callable[[str], Tokens]


def greedy(vocabulary: Sequence[str]) -> Encode:
    """The longest token first."""

    def encode(text: str) -> Tokens:
        if not text:
            return ()
        token = max((one for one in vocabulary if text.startswith(one)), key=len)
        return (token, *encode(text.removeprefix(token)))

    return encode


def bpe(*merges: tuple[str, str]) -> Encode:
    """Byte-pair encoding: merges in the order of their rank, from the left."""

    def encode(text: str) -> Tokens:
        tokens = list(text)
        for pair in merges:
            at = 0
            while at + 1 < len(tokens):
                if (tokens[at], tokens[at + 1]) == pair:
                    tokens[at : at + 2] = ["".join(pair)]
                at += 1
        return tuple(tokens)

    return encode


TEACHERS: dict[str, tuple[Tokens, Encode]] = {
    "aa": (("a", "b", "aa"), greedy(("a", "b", "aa"))),
    "aba": (("a", "b", "aba", "bb"), greedy(("a", "b", "aba", "bb"))),
    "bpe": (("a", "b", "ba", "aa"), bpe(("b", "a"), ("a", "a"))),
}


def sequences(vocabulary: Tokens, before: Tokens = ()) -> Iterator[Tokens]:
    """Every sequence of tokens of at most 5 bytes; those of a prefix come after it."""
    yield before
    for token in vocabulary:
        if len("".join(before)) + len(token) <= LONGEST:
            yield from sequences(vocabulary, (*before, token))


class Table:
    """Random probabilities of the next token after every prefix. `logits`: a leaf, [P, V]."""

    def __init__(self, vocabulary: Tokens, seed: int) -> None:
        self.vocabulary = (*vocabulary, END)
        self.prefixes = list(sequences(vocabulary))
        self._number = {prefix: number for number, prefix in enumerate(self.prefixes)}
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.prefixes), len(self.vocabulary))
        self.logits = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.logits.requires_grad_()
        lengths = torch.tensor([len(token) for token in self.vocabulary])
        left = torch.tensor([LONGEST - len("".join(prefix)) for prefix in self.prefixes])
        self._impossible = lengths > left[:, None]

    def logprobs(self) -> Tensor:
        """[P, V]: of the next token, -inf if it does not fit."""
        return self.logits.masked_fill(self._impossible, -torch.inf).log_softmax(1)

    def places(self, answer: Tokens) -> list[tuple[int, int]]:
        """Row and column of each token of an answer, with its end."""
        ended = (*answer, END)
        return [
            (self._number[answer[:i]], self.vocabulary.index(token))
            for i, token in enumerate(ended)
        ]

    def of_answers(self, answers: Sequence[Tokens]) -> Tensor:
        """log p [answers]."""
        table = self.logprobs()
        return torch.stack(
            [table[tuple(zip(*self.places(one), strict=True))].sum() for one in answers]
        )


@dataclass(frozen=True)
class Answers:
    """All answers of the student, their tokens one after the other: N tokens of S answers."""

    student: Table
    teacher: Table
    encode: Encode

    @property
    def all(self) -> list[Tokens]:
        return self.student.prefixes

    def encoded(self) -> list[Tokens]:
        """The teacher's tokens of each answer, without its end."""
        return [self.encode("".join(answer)) for answer in self.all]

    def canonical(self) -> Tensor:
        """Which answers the student's tokenizer writes, [S] bool."""
        own = greedy([token for token in self.student.vocabulary if token])
        return torch.tensor([own("".join(answer)) == answer for answer in self.all])

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """The student's log-probs [N], and the number of each token's answer [N]."""
        table = self.student.logprobs()
        places = [self.student.places(answer) for answer in self.all]
        rows, columns = zip(*[place for of in places for place in of], strict=True)
        lengths = torch.tensor([len(of) for of in places])
        return table[rows, columns], torch.arange(len(places)).repeat_interleave(lengths)

    def teacher_logprobs(self) -> list[Tensor]:
        """The teacher's log-probs of its tokens of each answer, with its end."""
        table = self.teacher.logprobs().detach()
        return [
            table[tuple(zip(*self.teacher.places(tokens), strict=True))]
            for tokens in self.encoded()
        ]

    def settled(self, before: str) -> int:
        """sigma: the teacher's tokens that every continuation of a text begins with."""
        letters = [token for token in self.student.vocabulary if len(token) == 1]
        texts = ["".join(of) for n in range(LONGEST + 1) for of in product(letters, repeat=n)]
        found = [(*self.encode(text), END) for text in texts if text.startswith(before)]
        same = zip(*found, strict=False)
        return next((i for i, of in enumerate(same) if len(set(of)) > 1), min(map(len, found)))

    def shares_to_the_end(self) -> Tensor:
        """log q of the tokens from sigma_i up to sigma_(i+1), [N]."""
        found = []
        for answer, q in zip(self.all, self.teacher_logprobs(), strict=True):
            bounds = [self.settled("".join(answer[:i])) for i in range(len(answer) + 1)]
            pairs = zip(bounds, [*bounds[1:], len(q)], strict=True)
            found += [q[first:last].sum() for first, last in pairs]
        return torch.stack(found)

    def chunks(self) -> tuple[Tensor, Tensor, list[int]]:
        """The chunk of each token [N], log q of its chunk [N], and the tokens in it."""
        number, chunks, of_chunk, size = -1, [], [], []
        for answer, tokens, q in zip(
            self.all, self.encoded(), self.teacher_logprobs(), strict=True
        ):
            ours = [len("".join(answer[: i + 1])) for i in range(len(answer))] + [LONGEST + 1]
            theirs = [len("".join(tokens[: i + 1])) for i in range(len(tokens))] + [LONGEST + 1]
            common = sorted({*ours} & {*theirs})
            for first, last in zip([0, *common], common, strict=False):
                number += 1
                count = sum(first < end <= last for end in ours)
                mass = sum(q[i] for i, end in enumerate(theirs) if first < end <= last)
                chunks += [number] * count
                of_chunk += [torch.as_tensor(mass)] * count
                size += [count] * count
        return torch.tensor(chunks), torch.stack(of_chunk), size

    def words(self) -> tuple[Tensor, Tensor]:
        """The word of each token [N], and a share of its log q at its first token [N]."""
        number, words, shares = -1, [], []
        for answer, tokens, q in zip(
            self.all, self.encoded(), self.teacher_logprobs(), strict=True
        ):
            text = "".join(answer)
            begins = [0, *(i for i in range(1, len(text)) if text[i - 1 : i + 1] == "a ")]
            begins = [*begins, len(text)] if text else [0]
            ours = [
                sum(len("".join(answer[:i])) >= one for one in begins) for i in range(len(answer))
            ]
            theirs = [
                sum(len("".join(tokens[:i])) >= one for one in begins) for i in range(len(tokens))
            ]
            ours, theirs = [*ours, len(begins)], [*theirs, len(begins)]
            words += [number + one for one in ours]
            number += len(begins)
            for i, one in enumerate(ours):
                first = i == 0 or ours[i - 1] != one
                mass = sum(q[j] for j, other in enumerate(theirs) if other == one)
                shares.append(torch.as_tensor(mass if first else 0.0, dtype=torch.float64))
        return torch.tensor(words), torch.stack(shares)
