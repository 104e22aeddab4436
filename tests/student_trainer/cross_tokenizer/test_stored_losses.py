"""Losses of answers written by a teacher, by enumeration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from student_trainer.cross_tokenizer.losses import Unit, chunk_divergence, mapped_kl
from student_trainer.losses import Rows, topk_kl
from tests.student_trainer.cross_tokenizer.toy_tokenizers import (
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
# One run: the places of the student's tokens in its table, and log q.
Run = tuple[list[tuple[int, int]], float]


@dataclass(frozen=True)
class TeacherAnswers:
    """Every answer that a teacher can write in any of its encodings, read by the student."""

    student: Table
    teacher: Table

    def runs(self, answer: Tokens, unit: Unit) -> list[Run]:
        """Return the runs of an answer of the teacher, and its end, by their definition."""
        text = "".join(answer)
        student_tokens = greedy([token for token in self.student.vocabulary if token])(text)
        student_ends, teacher_ends = ends(student_tokens), ends(answer)
        borders = sorted({*student_ends} & {*teacher_ends})
        if unit == "word":
            starts = {i for i in borders if 0 < i < len(text) and text[i - 1 : i + 1] == "a "}
            borders = sorted({*starts, len(text)} - {0})
        table = self.teacher.logprobs().detach()
        places = self.student.places(student_tokens)
        log_q = [float(table[place]) for place in self.teacher.places(answer)]
        token_runs = []
        for first, last in zip([0, *borders], borders, strict=False):
            run_places = [
                place
                for place, end in zip(places, student_ends, strict=False)
                if first < end <= last
            ]
            mass = sum(
                q for q, end in zip(log_q, teacher_ends, strict=False) if first < end <= last
            )
            token_runs.append((run_places, mass))
        return [*token_runs, ([places[-1]], log_q[-1])]

    def of_tokens(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs of `chunk_divergence` for all answers, and each token's answer, [N]."""
        table = self.student.logprobs()
        places, shares, units, answers = [], [], [], []
        number = -1
        for index, answer in enumerate(self.teacher.prefixes):
            for run_places, mass in self.runs(answer, unit):
                number += 1
                places += run_places
                shares += [mass, *[0.0] * (len(run_places) - 1)]
                units += [number] * len(run_places)
                answers += [index] * len(run_places)
        log_p = table[tuple(zip(*places, strict=True))]
        return (
            log_p,
            torch.tensor(shares, dtype=torch.float64),
            torch.tensor(units),
            torch.tensor(answers),
        )

    def weights(self) -> Tensor:
        """Return Q of each answer, [S]."""
        return self.teacher.of_answers(self.teacher.prefixes).detach().exp()


def ends(tokens: Tokens) -> list[int]:
    return [len("".join(tokens[: i + 1])) for i in range(len(tokens))]


def select_all(log_p: Tensor) -> Tensor:
    return torch.ones_like(log_p, dtype=torch.bool)


@pytest.fixture(params=[*TEACHERS, "words"])
def teacher_answers(request: pytest.FixtureRequest) -> TeacherAnswers:
    if request.param == "words":
        return TeacherAnswers(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))
    return TeacherAnswers(Table(STUDENT, 1), Table(TEACHERS[request.param][0], 2))


def kl_by_definition(teacher_answers: TeacherAnswers, unit: Unit, t: float) -> Tensor:
    """Return the mean over answers of the sum of the binarised KL of their runs, times t."""
    table = teacher_answers.student.logprobs()
    total = torch.zeros((), dtype=torch.float64)
    for answer, weight in zip(
        teacher_answers.teacher.prefixes, teacher_answers.weights(), strict=True
    ):
        for run_places, mass in teacher_answers.runs(answer, unit):
            a = math.exp(mass) ** (1 / t)
            b = torch.stack([table[place] for place in run_places]).exp().prod() ** (1 / t)
            kl = a * (math.log(a) - b.log())
            if a < 1:
                kl = kl + (1 - a) * (math.log1p(-a) - torch.log1p(-b))
            total = total + weight * t * kl
    return total


@pytest.mark.parametrize("unit", ["chunk", "word"])
@pytest.mark.parametrize("t", [1.0, 100.0])
def test_value_and_gradient_are_those_of_the_definition(
    teacher_answers: TeacherAnswers, unit: Unit, t: float
) -> None:
    log_p, shares, units, answer = teacher_answers.of_tokens(unit)
    losses = chunk_divergence(log_p, shares, units, select_all(log_p), temperature=t)
    assert bool((losses.detach() > -EXACT).all())
    mean = (teacher_answers.weights()[answer] * losses).sum()
    expected_mean = kl_by_definition(teacher_answers, unit, t)
    # An end with probability 1 counts as e^-1e-6, by which the value may differ.
    assert float(mean.detach()) == pytest.approx(float(expected_mean.detach()), rel=1e-4)
    gradient, expected_gradient = (
        torch.autograd.grad(value, teacher_answers.student.logits, retain_graph=True)[0]
        for value in (mean, expected_mean)
    )
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-4


def test_a_student_that_agrees_has_no_divergence_and_no_gradient() -> None:
    log_p = torch.tensor([-0.5, -2.0, -30.0, -1e-3], dtype=torch.float64, requires_grad=True)
    units = torch.tensor([0, 1, 1, 2])
    shares = torch.tensor([-0.5, -12.0, -20.0, -1e-3]).double()
    losses = chunk_divergence(log_p, shares, units, select_all(log_p))
    (gradient,) = torch.autograd.grad(losses.sum(), log_p)
    assert float(losses.detach().abs().max()) < EXACT
    assert float(gradient.abs().max()) < 1e-6


def test_a_large_temperature_compares_lengths_of_codes() -> None:
    """l_p - l_q - l_q log(l_p/l_q), whose gradient in log p is l_q/l_p - 1."""
    student_lengths = torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    teacher_lengths = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64)
    log_p = (-student_lengths).requires_grad_()
    losses = chunk_divergence(
        log_p, -teacher_lengths, torch.arange(3), select_all(log_p), temperature=1e6
    )
    (gradient,) = torch.autograd.grad(losses.sum(), log_p)
    expected_losses = (
        student_lengths
        - teacher_lengths
        - teacher_lengths * (student_lengths / teacher_lengths).log()
    )
    assert losses.detach().tolist() == pytest.approx(expected_losses.tolist(), rel=1e-3)
    assert gradient.tolist() == pytest.approx(
        (teacher_lengths / student_lengths - 1).tolist(), rel=1e-3
    )


def test_runs_that_are_not_learned_have_neither() -> None:
    log_p = torch.tensor([-1.0, -2.0, -torch.inf], requires_grad=True)
    is_learned = torch.tensor([True, False, False])
    losses = chunk_divergence(
        log_p, torch.tensor([-3.0, -9.0, 0.0]), torch.tensor([0, 1, 1]), is_learned
    )
    (gradient,) = torch.autograd.grad(losses.sum(), log_p)
    assert losses[0] > 0
    assert losses[1:].tolist() == [0, 0]
    assert gradient[0] > 0  # the student finds the run likelier than the teacher
    assert gradient[1:].tolist() == [0, 0]


@pytest.mark.parametrize("t", [1.0, 100.0])
def test_extreme_log_probs_are_finite(t: float) -> None:
    """In float32: certain, impossible and very unlikely runs, on either side."""
    values = torch.tensor([0.0, -1e-9, -1e-4, -50.0, -1e4, -torch.inf])
    log_p, shares = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    log_p = log_p.clone().requires_grad_()
    losses = chunk_divergence(
        log_p, shares, torch.arange(len(log_p)), select_all(log_p), temperature=t
    )
    (gradient,) = torch.autograd.grad(losses.sum(), log_p)
    assert bool(losses.isfinite().all())
    assert bool((losses > -1e-3).all())
    assert bool(gradient.isfinite().all())


def test_the_cross_entropy_has_the_gradient_of_the_forward_kl(
    teacher_answers: TeacherAnswers,
) -> None:
    """KL(Q||P') of byte strings; P'(x) = p(s(x)) is the probability of the student's encoding."""
    log_p, _, _, answer = teacher_answers.of_tokens("chunk")
    cross_entropy = -(teacher_answers.weights()[answer] * log_p).sum()
    text_mass: dict[str, float] = {}
    for tokens, weight in zip(
        teacher_answers.teacher.prefixes, teacher_answers.weights().tolist(), strict=True
    ):
        text_mass["".join(tokens)] = text_mass.get("".join(tokens), 0.0) + weight
    encode_student = greedy([token for token in teacher_answers.student.vocabulary if token])
    text_logprobs = teacher_answers.student.of_answers([encode_student(text) for text in text_mass])
    mass = torch.tensor(list(text_mass.values()), dtype=torch.float64)
    kl = (mass * (mass.log() - text_logprobs)).sum()
    gradient, expected_gradient = (
        torch.autograd.grad(value, teacher_answers.student.logits, retain_graph=True)[0]
        for value in (cross_entropy, kl)
    )
    assert float((gradient - expected_gradient).abs().max()) < EXACT


def mapped_losses(
    teacher_answers: TeacherAnswers, k: int, *, within_words: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `mapped_kl` of every token [N] without shares, with the teacher's k likeliest ids.

    Also return the answer of each token [N]. within_words: also where tokens begin within a word.
    """
    student, teacher = (
        teacher_answers.student.logprobs(),
        teacher_answers.teacher.logprobs().detach(),
    )
    encode_student = greedy([token for token in teacher_answers.student.vocabulary if token])
    vocabulary = teacher_answers.teacher.vocabulary
    first_ids = [
        teacher_answers.student.vocabulary.index(encode_student(token)[0] if token else END)
        for token in vocabulary
    ]
    places, samples, weights, answers = [], [], [], []
    for index, answer in enumerate(teacher_answers.teacher.prefixes):
        text = "".join(answer)
        starts = [0, *ends(answer)]  # of its tokens, and of the end
        encoding = encode_student(text)
        for place, start in zip(
            teacher_answers.student.places(encoding), [0, *ends(encoding)], strict=True
        ):
            weight = torch.zeros(len(vocabulary), dtype=torch.float64)
            if start in starts and (start == 0 or text[start - 1] == "a" or within_words):
                t = starts.index(start)
                row, column = teacher_answers.teacher.places(answer)[t]
                head = teacher[row].topk(k).indices.tolist()
                word_ids = [v for v in head if teacher[row, v] > -torch.inf]
                if start and not within_words:
                    word_ids = [v for v in word_ids if vocabulary[v] in ("", " ", " aa")]
                if column in word_ids:
                    q = teacher[row, word_ids].exp()
                    weight[word_ids] = q / q.sum()
                    weight[column] -= 1
            places.append(place)
            samples.append([(place[0], first_id) for first_id in first_ids])
            weights.append(weight)
            answers.append(index)
    flat = [head_place for row_places in samples for head_place in row_places]
    head_logprobs = student[tuple(zip(*flat, strict=True))].reshape(len(places), -1)
    log_p = student[tuple(zip(*places, strict=True))]
    rows = Rows(log_p[:, None][:, :0], torch.zeros_like(log_p), log_p, head_logprobs)
    no_shares = torch.zeros_like(log_p.detach())
    losses = mapped_kl(rows, no_shares, torch.stack(weights), select_all(log_p))
    return losses, torch.tensor(answers)


@pytest.fixture
def wordy() -> TeacherAnswers:
    return TeacherAnswers(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))


def student_gradient(teacher_answers: TeacherAnswers, value: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, teacher_answers.student.logits, retain_graph=True)
    return gradient


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_rows_of_word_beginnings_do_not_change_the_mean(wordy: TeacherAnswers, k: int) -> None:
    """The mean value and gradient are those of -log p, with any head. Rows in words are biased."""
    log_p, _, _, answer = wordy.of_tokens("chunk")
    cross_entropy = -(wordy.weights()[answer] * log_p).sum()
    losses, answers = mapped_losses(wordy, k)
    mean = (wordy.weights()[answers] * losses).sum()
    assert float(mean.detach()) == pytest.approx(float(cross_entropy.detach()), abs=EXACT)
    gradient, expected_gradient = (
        student_gradient(wordy, mean),
        student_gradient(wordy, cross_entropy),
    )
    assert float((gradient - expected_gradient).abs().max()) < EXACT
    losses, answers = mapped_losses(wordy, k, within_words=True)
    biased_gradient = student_gradient(wordy, (wordy.weights()[answers] * losses).sum())
    bias = float((biased_gradient - expected_gradient).norm() / expected_gradient.norm())
    print(f"k = {k}, also within words: {bias:.0%}")
    assert bias > 0.01 or k == 1


def test_rows_of_word_beginnings_vary_less(wordy: TeacherAnswers) -> None:
    """The variance of an answer's gradient, summed over all parameters."""
    log_p, _, _, answer = wordy.of_tokens("chunk")
    losses, answers = mapped_losses(wordy, 5)
    weights = wordy.weights()
    variances = []
    for token_losses, answer_of_token in ((-log_p, answer), (losses, answers)):
        gradients = torch.stack(
            [
                student_gradient(wordy, token_losses[answer_of_token == number].sum())
                for number in range(len(weights))
            ]
        ).flatten(1)
        mean = weights @ gradients
        variances.append(float(weights @ (gradients - mean).square().sum(1)))
    print(f"variance of the gradient: {variances[0]:.3f} -> {variances[1]:.3f}")
    assert variances[1] < variances[0]


def test_with_one_tokenizer_it_is_the_kl_over_the_head() -> None:
    """It holds if the head has all ids; otherwise the tail is sampled."""
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(7, 9, dtype=torch.float64, generator=generator).log_softmax(1) for _ in range(2)
    )
    tokens = torch.tensor([0, 3, 8, 1, 2, 5, 7])[:, None]
    token_one_hot = torch.nn.functional.one_hot(tokens[:, 0], 9)
    weights = q.exp() - token_one_hot
    shares = q.gather(1, tokens)[:, 0] + (weights * q).sum(1)
    rows = Rows(p[:, :0], torch.zeros(7), p.gather(1, tokens)[:, 0], p)
    losses = mapped_kl(rows, shares, weights, torch.ones(7, dtype=torch.bool))
    no_tail = torch.full((7,), -torch.inf, dtype=torch.float64)
    row_pairs = (Rows(logprobs, no_tail, logprobs.gather(1, tokens)[:, 0]) for logprobs in (p, q))
    expected_losses = topk_kl(
        *row_pairs, torch.ones(7, dtype=torch.bool), direction="forward", tail="none"
    )
    assert losses.tolist() == pytest.approx(expected_losses.tolist(), abs=EXACT)


def minimize_loss(form: str) -> float:
    """Return KL(Q||P') of byte strings after Adam has followed the mean gradient of a form."""
    teacher_answers = TeacherAnswers(Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2))
    adam = torch.optim.Adam([teacher_answers.student.logits], lr=0.1)
    weights = teacher_answers.weights()
    for _ in range(150):
        log_p, shares, units, answer = teacher_answers.of_tokens(
            "word" if form == "word" else "chunk"
        )
        if form == "row":
            losses, answer = mapped_losses(teacher_answers, 3)
        else:
            losses = chunk_divergence(log_p, shares, units, select_all(log_p))
        adam.zero_grad()
        (weights[answer] * losses).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
    text_mass: dict[str, float] = {}
    for tokens, weight in zip(teacher_answers.teacher.prefixes, weights.tolist(), strict=True):
        text_mass["".join(tokens)] = text_mass.get("".join(tokens), 0.0) + weight
    encode_student = greedy([token for token in teacher_answers.student.vocabulary if token])
    text_logprobs = teacher_answers.student.of_answers(
        [encode_student(text) for text in text_mass]
    ).detach()
    mass = torch.tensor(list(text_mass.values()), dtype=torch.float64)
    return float((mass * (mass.log() - text_logprobs)).sum())


@pytest.mark.slow
def test_where_the_forms_lead() -> None:
    """Losses of runs have another minimum, as later text decides the boundary of a run."""
    minima = {form: minimize_loss(form) for form in ("row", "chunk", "word")}
    print({form: round(kl, 3) for form, kl in minima.items()})
    assert minima["row"] < 0.05
    assert min(minima["chunk"], minima["word"]) > 0.2
