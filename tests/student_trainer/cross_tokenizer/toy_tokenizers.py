"""Every answer of at most 5 bytes over an alphabet of two, with a student and teachers.

The alphabet is {a, b}, or {a, " "} for words.

Probabilities are tables of random logits for every prefix of tokens, so expectations are sums.
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
# Vocabularies for words: no token spans two words.
STUDENT_OF_WORDS = ("a", " ", "aa", " a")
TEACHER_OF_WORDS = ("a", " ", "aaa", " aa")

Tokens = tuple[str, ...]
Encode = Callable[[str], Tokens]


def greedy(vocabulary: Sequence[str]) -> Encode:
    """Return an encoder that takes the longest matching token first."""

    def encode(text: str) -> Tokens:
        if not text:
            return ()
        token = max((candidate for candidate in vocabulary if text.startswith(candidate)), key=len)
        return (token, *encode(text.removeprefix(token)))

    return encode


def bpe(*merges: tuple[str, str]) -> Encode:
    """Return a byte-pair encoder, which applies merges by rank, from the left."""

    def encode(text: str) -> Tokens:
        tokens = list(text)
        for pair in merges:
            index = 0
            while index + 1 < len(tokens):
                if (tokens[index], tokens[index + 1]) == pair:
                    tokens[index : index + 2] = ["".join(pair)]
                index += 1
        return tuple(tokens)

    return encode


TEACHERS: dict[str, tuple[Tokens, Encode]] = {
    "aa": (("a", "b", "aa"), greedy(("a", "b", "aa"))),
    "aba": (("a", "b", "aba", "bb"), greedy(("a", "b", "aba", "bb"))),
    "bpe": (("a", "b", "ba", "aa"), bpe(("b", "a"), ("a", "a"))),
}


def sequences(vocabulary: Tokens, prefix: Tokens = ()) -> Iterator[Tokens]:
    """Yield every sequence of tokens of at most 5 bytes, a prefix before its continuations."""
    yield prefix
    for token in vocabulary:
        if len("".join(prefix)) + len(token) <= LONGEST:
            yield from sequences(vocabulary, (*prefix, token))


class Table:
    """Random probabilities of the next token after every prefix; `logits` [P, V] is a leaf."""

    def __init__(self, vocabulary: Tokens, seed: int) -> None:
        self.vocabulary = (*vocabulary, END)
        self.prefixes = list(sequences(vocabulary))
        self._number = {prefix: number for number, prefix in enumerate(self.prefixes)}
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.prefixes), len(self.vocabulary))
        self.logits = torch.randn(shape, dtype=torch.float64, generator=generator)
        self.logits.requires_grad_()
        lengths = torch.tensor([len(token) for token in self.vocabulary])
        bytes_left = torch.tensor([LONGEST - len("".join(prefix)) for prefix in self.prefixes])
        self._impossible = lengths > bytes_left[:, None]

    def logprobs(self) -> Tensor:
        """Return log-probs of the next token, [P, V]; -inf if it is too long."""
        return self.logits.masked_fill(self._impossible, -torch.inf).log_softmax(1)

    def places(self, answer: Tokens) -> list[tuple[int, int]]:
        """Return row and column of each token of an answer, and of its end."""
        tokens_and_end = (*answer, END)
        return [
            (self._number[answer[:i]], self.vocabulary.index(token))
            for i, token in enumerate(tokens_and_end)
        ]

    def of_answers(self, answers: Sequence[Tokens]) -> Tensor:
        """Return log p of each answer, [answers]."""
        table = self.logprobs()
        return torch.stack(
            [table[tuple(zip(*self.places(answer), strict=True))].sum() for answer in answers]
        )


@dataclass(frozen=True)
class Answers:
    """All S answers of the student, with N tokens in total."""

    student: Table
    teacher: Table
    encode: Encode

    @property
    def all(self) -> list[Tokens]:
        return self.student.prefixes

    def encode_answers(self) -> list[Tokens]:
        """Return the teacher's tokens of each answer, without its end."""
        return [self.encode("".join(answer)) for answer in self.all]

    def canonical(self) -> Tensor:
        """Return which answers are the encoding by the student's tokenizer, [S] bool."""
        encode_student = greedy([token for token in self.student.vocabulary if token])
        return torch.tensor([encode_student("".join(answer)) == answer for answer in self.all])

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the student's log-probs [N], and the number of each token's answer [N]."""
        table = self.student.logprobs()
        places = [self.student.places(answer) for answer in self.all]
        rows, columns = zip(
            *[place for answer_places in places for place in answer_places], strict=True
        )
        lengths = torch.tensor([len(answer_places) for answer_places in places])
        return table[rows, columns], torch.arange(len(places)).repeat_interleave(lengths)

    def teacher_logprobs(self) -> list[Tensor]:
        """Return the teacher's log-probs of its tokens of each answer, with its end."""
        table = self.teacher.logprobs().detach()
        return [
            table[tuple(zip(*self.teacher.places(tokens), strict=True))]
            for tokens in self.encode_answers()
        ]

    def count_settled(self, prefix: str) -> int:
        """Return sigma: how many tokens of the teacher every continuation of a text begins with."""
        letters = [token for token in self.student.vocabulary if len(token) == 1]
        texts = [
            "".join(letters_of_text)
            for n in range(LONGEST + 1)
            for letters_of_text in product(letters, repeat=n)
        ]
        encodings = [(*self.encode(text), END) for text in texts if text.startswith(prefix)]
        tokens_by_position = zip(*encodings, strict=False)
        return next(
            (i for i, tokens in enumerate(tokens_by_position) if len(set(tokens)) > 1),
            min(map(len, encodings)),
        )

    def shares_to_the_end(self) -> Tensor:
        """Return log q of the tokens from sigma_i up to sigma_(i+1), [N]."""
        shares = []
        for answer, q in zip(self.all, self.teacher_logprobs(), strict=True):
            bounds = [self.count_settled("".join(answer[:i])) for i in range(len(answer) + 1)]
            pairs = zip(bounds, [*bounds[1:], len(q)], strict=True)
            shares += [q[first:last].sum() for first, last in pairs]
        return torch.stack(shares)

    def chunks(self) -> tuple[Tensor, Tensor, list[int]]:
        """Return the chunk of each token [N], log q of the chunk [N], and its token count."""
        number, chunks, chunk_logprobs, chunk_sizes = -1, [], [], []
        for answer, tokens, q in zip(
            self.all, self.encode_answers(), self.teacher_logprobs(), strict=True
        ):
            student_ends = [len("".join(answer[: i + 1])) for i in range(len(answer))] + [
                LONGEST + 1
            ]
            teacher_ends = [len("".join(tokens[: i + 1])) for i in range(len(tokens))] + [
                LONGEST + 1
            ]
            common = sorted({*student_ends} & {*teacher_ends})
            for first, last in zip([0, *common], common, strict=False):
                number += 1
                count = sum(first < end <= last for end in student_ends)
                mass = sum(q[i] for i, end in enumerate(teacher_ends) if first < end <= last)
                chunks += [number] * count
                chunk_logprobs += [torch.as_tensor(mass)] * count
                chunk_sizes += [count] * count
        return torch.tensor(chunks), torch.stack(chunk_logprobs), chunk_sizes

    def words(self) -> tuple[Tensor, Tensor]:
        """Return the word of each token [N], and log q of words at their first tokens [N]."""
        number, words, shares = -1, [], []
        for answer, tokens, q in zip(
            self.all, self.encode_answers(), self.teacher_logprobs(), strict=True
        ):
            text = "".join(answer)
            word_starts = [0, *(i for i in range(1, len(text)) if text[i - 1 : i + 1] == "a ")]
            word_starts = [*word_starts, len(text)] if text else [0]
            student_words = [
                sum(len("".join(answer[:i])) >= word_start for word_start in word_starts)
                for i in range(len(answer))
            ]
            teacher_words = [
                sum(len("".join(tokens[:i])) >= word_start for word_start in word_starts)
                for i in range(len(tokens))
            ]
            student_words, teacher_words = (
                [*student_words, len(word_starts)],
                [*teacher_words, len(word_starts)],
            )
            words += [number + word for word in student_words]
            number += len(word_starts)
            for i, word in enumerate(student_words):
                is_first = i == 0 or student_words[i - 1] != word
                mass = sum(
                    q[j] for j, teacher_word in enumerate(teacher_words) if teacher_word == word
                )
                shares.append(torch.as_tensor(mass if is_first else 0.0, dtype=torch.float64))
        return torch.tensor(words), torch.stack(shares)
