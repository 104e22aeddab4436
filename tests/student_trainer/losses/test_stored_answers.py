"""Losses of answers that a teacher has written, enumerated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from student_trainer.losses import Rows, Unit, chunk_divergence, mapped_kl, topk_kl
from tests.student_trainer.losses.toy_tokenizers import (
    END,
    STUDENT,
    STUDENT_OF_WORDS,
    TEACHER_OF_WORDS,
    TEACHERS,
    Table,
    Tokens,
    greedy,
)

EXACT = 1e-12
# One run: the student's tokens in it, as places in its table, and log q.
Run = tuple[list[tuple[int, int]], float]


@dataclass(frozen=True)
class Written:
    """Every answer that a teacher can write in any of its encodings; the student reads them."""

    student: Table
    teacher: Table

    def runs(self, answer: Tokens, unit: Unit) -> list[Run]:
        """The runs of an answer of the teacher, and its end, by the definition."""
        text = "".join(answer)
        own = greedy([one for one in self.student.vocabulary if one])(text)
        ours, theirs = ends(own), ends(answer)
        borders = sorted({*ours} & {*theirs})
        if unit == "word":
            starts = {i for i in borders if 0 < i < len(text) and text[i - 1 : i + 1] == "a "}
            borders = sorted({*starts, len(text)} - {0})
        table = self.teacher.logprobs().detach()
        places = self.student.places(own)
        log_q = [float(table[place]) for place in self.teacher.places(answer)]
        found = []
        for first, last in zip([0, *borders], borders, strict=False):
            mine = [place for place, end in zip(places, ours, strict=False) if first < end <= last]
            mass = sum(q for q, end in zip(log_q, theirs, strict=False) if first < end <= last)
            found.append((mine, mass))
        return [*found, ([places[-1]], log_q[-1])]

    def of_tokens(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `chunk_divergence` takes of all answers, and the answer of each token, [N]."""
        table = self.student.logprobs()
        places, shares, units, answers = [], [], [], []
        number = -1
        for index, answer in enumerate(self.teacher.prefixes):
            for mine, mass in self.runs(answer, unit):
                number += 1
                places += mine
                shares += [mass, *[0.0] * (len(mine) - 1)]
                units += [number] * len(mine)
                answers += [index] * len(mine)
        log_p = table[tuple(zip(*places, strict=True))]
        return (
            log_p,
            torch.tensor(shares, dtype=torch.float64),
            torch.tensor(units),
            torch.tensor(answers),
        )

    def weights(self) -> Tensor:
        """Q of each answer, [S]."""
        return self.teacher.of_answers(self.teacher.prefixes).detach().exp()


def ends(tokens: Tokens) -> list[int]:
    return [len("".join(tokens[: i + 1])) for i in range(len(tokens))]


def everything(log_p: Tensor) -> Tensor:
    return torch.ones_like(log_p, dtype=torch.bool)


@pytest.fixture(params=[*TEACHERS, "words"])
def written(request: pytest.FixtureRequest) -> Written:
    if request.param == "words":
        return Written(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))
    return Written(Table(STUDENT, 1), Table(TEACHERS[request.param][0], 2))


def defined(written: Written, unit: Unit, t: float) -> Tensor:
    """The mean over answers of the sum of the binarised KL of their runs, times t."""
    table = written.student.logprobs()
    total = torch.zeros((), dtype=torch.float64)
    for answer, weight in zip(written.teacher.prefixes, written.weights(), strict=True):
        for mine, mass in written.runs(answer, unit):
            a = math.exp(mass) ** (1 / t)
            b = torch.stack([table[place] for place in mine]).exp().prod() ** (1 / t)
            kl = a * (math.log(a) - b.log())
            if a < 1:
                kl = kl + (1 - a) * (math.log1p(-a) - torch.log1p(-b))
            total = total + weight * t * kl
    return total


@pytest.mark.parametrize("unit", ["chunk", "word"])
@pytest.mark.parametrize("t", [1.0, 100.0])
def test_value_and_gradient_are_those_of_the_definition(
    written: Written, unit: Unit, t: float
) -> None:
    log_p, shares, units, answer = written.of_tokens(unit)
    found = chunk_divergence(log_p, shares, units, everything(log_p), temperature=t)
    assert bool((found.detach() > -EXACT).all())
    mean = (written.weights()[answer] * found).sum()
    wanted = defined(written, unit, t)
    # An end that is certain counts as e^-1e-6; so much the value may differ.
    assert float(mean.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    one, other = (
        torch.autograd.grad(of, written.student.logits, retain_graph=True)[0]
        for of in (mean, wanted)
    )
    assert float((one - other).norm() / other.norm()) < 1e-4


def test_a_student_that_agrees_has_no_divergence_and_no_gradient() -> None:
    log_p = torch.tensor([-0.5, -2.0, -30.0, -1e-3], dtype=torch.float64, requires_grad=True)
    units = torch.tensor([0, 1, 1, 2])
    shares = torch.tensor([-0.5, -12.0, -20.0, -1e-3]).double()
    found = chunk_divergence(log_p, shares, units, everything(log_p))
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    assert float(found.detach().abs().max()) < EXACT
    assert float(gradient.abs().max()) < 1e-6


def test_a_large_temperature_compares_lengths_of_codes() -> None:
    """l_p - l_q - l_q log(l_p/l_q), whose gradient in log p is l_q/l_p - 1."""
    ours = torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    theirs = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64)
    log_p = (-ours).requires_grad_()
    found = chunk_divergence(log_p, -theirs, torch.arange(3), everything(log_p), temperature=1e6)
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    wanted = ours - theirs - theirs * (ours / theirs).log()
    assert found.detach().tolist() == pytest.approx(wanted.tolist(), rel=1e-3)
    assert gradient.tolist() == pytest.approx((theirs / ours - 1).tolist(), rel=1e-3)


def test_runs_that_are_not_learned_have_neither() -> None:
    log_p = torch.tensor([-1.0, -2.0, -torch.inf], requires_grad=True)
    learned = torch.tensor([True, False, False])
    found = chunk_divergence(
        log_p, torch.tensor([-3.0, -9.0, 0.0]), torch.tensor([0, 1, 1]), learned
    )
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    assert found[0] > 0
    assert found[1:].tolist() == [0, 0]
    assert gradient[0] > 0  # the student finds the run likelier than the teacher
    assert gradient[1:].tolist() == [0, 0]


@pytest.mark.parametrize("t", [1.0, 100.0])
def test_extreme_log_probs_are_finite(t: float) -> None:
    """In float32: certain, impossible and very unlikely runs, on either side."""
    values = torch.tensor([0.0, -1e-9, -1e-4, -50.0, -1e4, -torch.inf])
    log_p, shares = (of.flatten() for of in torch.meshgrid(values, values, indexing="ij"))
    log_p = log_p.clone().requires_grad_()
    found = chunk_divergence(
        log_p, shares, torch.arange(len(log_p)), everything(log_p), temperature=t
    )
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    assert bool(found.isfinite().all())
    assert bool((found > -1e-3).all())
    assert bool(gradient.isfinite().all())


def test_the_cross_entropy_has_the_gradient_of_the_forward_kl(written: Written) -> None:
    """KL(Q||P') of byte strings; P'(x) = p(s(x)) is the probability of the student's encoding."""
    log_p, _, _, answer = written.of_tokens("chunk")
    cross_entropy = -(written.weights()[answer] * log_p).sum()
    of_text: dict[str, float] = {}
    for tokens, weight in zip(written.teacher.prefixes, written.weights().tolist(), strict=True):
        of_text["".join(tokens)] = of_text.get("".join(tokens), 0.0) + weight
    own = greedy([one for one in written.student.vocabulary if one])
    of_student = written.student.of_answers([own(text) for text in of_text])
    mass = torch.tensor(list(of_text.values()), dtype=torch.float64)
    kl = (mass * (mass.log() - of_student)).sum()
    one, other = (
        torch.autograd.grad(of, written.student.logits, retain_graph=True)[0]
        for of in (cross_entropy, kl)
    )
    assert float((one - other).abs().max()) < EXACT


def mapped_losses(written: Written, k: int, *, within_words: bool = False) -> tuple[Tensor, Tensor]:
    """`mapped_kl` without shares of every token, [N], with the k likeliest ids of the teacher.

    Also the answer of each token [N]. within_words: also where tokens of both begin within a word.
    """
    student, teacher = written.student.logprobs(), written.teacher.logprobs().detach()
    own = greedy([one for one in written.student.vocabulary if one])
    vocabulary = written.teacher.vocabulary
    first = [
        written.student.vocabulary.index(own(token)[0] if token else END) for token in vocabulary
    ]
    places, samples, weights, answers = [], [], [], []
    for index, answer in enumerate(written.teacher.prefixes):
        text = "".join(answer)
        starts = [0, *ends(answer)]  # of its tokens, and of the end
        read = own(text)
        for place, start in zip(written.student.places(read), [0, *ends(read)], strict=True):
            weight = torch.zeros(len(vocabulary), dtype=torch.float64)
            if start in starts and (start == 0 or text[start - 1] == "a" or within_words):
                t = starts.index(start)
                row, column = written.teacher.places(answer)[t]
                head = teacher[row].topk(k).indices.tolist()
                begins = [v for v in head if teacher[row, v] > -torch.inf]
                if start and not within_words:
                    begins = [v for v in begins if vocabulary[v] in ("", " ", " aa")]
                if column in begins:
                    q = teacher[row, begins].exp()
                    weight[begins] = q / q.sum()
                    weight[column] -= 1
            places.append(place)
            samples.append([(place[0], one) for one in first])
            weights.append(weight)
            answers.append(index)
    flat = [one for of in samples for one in of]
    of_heads = student[tuple(zip(*flat, strict=True))].reshape(len(places), -1)
    log_p = student[tuple(zip(*places, strict=True))]
    rows = Rows(log_p[:, None][:, :0], torch.zeros_like(log_p), log_p, of_heads)
    none = torch.zeros_like(log_p.detach())
    found = mapped_kl(rows, none, torch.stack(weights), everything(log_p))
    return found, torch.tensor(answers)


@pytest.fixture
def wordy() -> Written:
    return Written(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))


def of_student(written: Written, value: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, written.student.logits, retain_graph=True)
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_rows_of_word_beginnings_do_not_change_the_mean(wordy: Written, k: int) -> None:
    """Of value and gradient, with any head: those of -log p. Elsewhere they would."""
    log_p, _, _, answer = wordy.of_tokens("chunk")
    plain = -(wordy.weights()[answer] * log_p).sum()
    losses, answers = mapped_losses(wordy, k)
    mean = (wordy.weights()[answers] * losses).sum()
    assert float(mean.detach()) == pytest.approx(float(plain.detach()), abs=EXACT)
    one, other = of_student(wordy, mean), of_student(wordy, plain)
    assert float((one - other).abs().max()) < EXACT
    losses, answers = mapped_losses(wordy, k, within_words=True)
    biased = of_student(wordy, (wordy.weights()[answers] * losses).sum())
    bias = float((biased - other).norm() / other.norm())
    print(f"k = {k}, also within words: {bias:.0%}")
    assert bias > 0.01 or k == 1


def test_rows_of_word_beginnings_vary_less(wordy: Written) -> None:
    """The variance of an answer's gradient, summed over all parameters."""
    log_p, _, _, answer = wordy.of_tokens("chunk")
    losses, answers = mapped_losses(wordy, 5)
    weights = wordy.weights()
    found = []
    for of_tokens, of in ((-log_p, answer), (losses, answers)):
        gradients = torch.stack(
            [of_student(wordy, of_tokens[of == number].sum()) for number in range(len(weights))]
        ).flatten(1)
        mean = weights @ gradients
        found.append(float(weights @ (gradients - mean).square().sum(1)))
    print(f"variance of the gradient: {found[0]:.3f} -> {found[1]:.3f}")
    assert found[1] < found[0]


def test_with_one_tokenizer_it_is_the_kl_over_the_head() -> None:
    """If the token is in the head, and the head is everything; otherwise a sample of the tail."""
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(7, 9, dtype=torch.float64, generator=generator).log_softmax(1) for _ in range(2)
    )
    tokens = torch.tensor([0, 3, 8, 1, 2, 5, 7])[:, None]
    own = torch.nn.functional.one_hot(tokens[:, 0], 9)
    weights = q.exp() - own
    shares = q.gather(1, tokens)[:, 0] + (weights * q).sum(1)
    rows = Rows(p[:, :0], torch.zeros(7), p.gather(1, tokens)[:, 0], p)
    found = mapped_kl(rows, shares, weights, torch.ones(7, dtype=torch.bool))
    none = torch.full((7,), -torch.inf, dtype=torch.float64)
    both = (Rows(of, none, of.gather(1, tokens)[:, 0]) for of in (p, q))
    wanted = topk_kl(*both, torch.ones(7, dtype=torch.bool), direction="forward", tail="none")
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=EXACT)


def minimum(form: str) -> float:
    """KL(Q||P') of byte strings after Adam has followed the mean of the form's gradient."""
    written = Written(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))
    adam = torch.optim.Adam([written.student.logits], lr=0.1)
    weights = written.weights()
    for _ in range(150):
        log_p, shares, units, answer = written.of_tokens("word" if form == "word" else "chunk")
        if form == "row":
            losses, answer = mapped_losses(written, 3)
        else:
            losses = chunk_divergence(log_p, shares, units, everything(log_p))
        adam.zero_grad()
        (weights[answer] * losses).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    of_text: dict[str, float] = {}
    for tokens, weight in zip(written.teacher.prefixes, weights.tolist(), strict=True):
        of_text["".join(tokens)] = of_text.get("".join(tokens), 0.0) + weight
    own = greedy([one for one in written.student.vocabulary if one])
    of_student = written.student.of_answers([own(text) for text in of_text]).detach()
    mass = torch.tensor(list(of_text.values()), dtype=torch.float64)
    return float((mass * (mass.log() - of_student)).sum())


def test_where_the_forms_lead() -> None:
    """Likelihoods of runs have another minimum: what follows a run decides its boundary."""
    found = {form: minimum(form) for form in ("row", "chunk", "word")}
    print({form: round(kl, 3) for form, kl in found.items()})
    assert found["row"] < 0.05
    assert min(found["chunk"], found["word"]) > 0.2
