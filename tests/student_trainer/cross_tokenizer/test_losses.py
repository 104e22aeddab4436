"""Losses across tokenizers, by enumeration of every answer of at most 5 bytes over two letters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from student_trainer.cross_tokenizer.losses import (
    costs_to_come,
    cross_tokenizer_kl,
    word_advantages,
)
from student_trainer.losses import Rows, topk_kl
from tests.student_trainer.cross_tokenizer.toy_tokenizers import (
    END,
    STUDENT,
    STUDENT_OF_WORDS,
    TEACHER_OF_WORDS,
    TEACHERS,
    Answers,
    Table,
    greedy,
)

EXACT = 1e-12


@pytest.fixture(params=TEACHERS)
def toy(request: pytest.FixtureRequest) -> Answers:
    vocabulary, encode = TEACHERS[request.param]
    return Answers(Table(STUDENT, 1), Table(vocabulary, 2), encode)


def gradient(value: Tensor, toy: Answers) -> Tensor:
    (value_gradient,) = torch.autograd.grad(value, toy.student.logits, retain_graph=True)
    return value_gradient


def costs(toy: Answers) -> tuple[Tensor, Tensor]:
    """log p and L of every answer, [S]; gradients flow through both."""
    log_p = toy.student.of_answers(toy.all)
    return log_p, log_p - torch.stack([q.sum() for q in toy.teacher_logprobs()])


def exact_gradient(toy: Answers) -> Tensor:
    """Return the gradient of E[L]."""
    log_p, cost = costs(toy)
    return gradient((log_p.exp() * cost).sum(), toy)


def mean_loss(token_losses: Tensor, toy: Answers, answer: Tensor) -> Tensor:
    """Return the mean over all answers of the sum of token losses [N]."""
    weights = costs(toy)[0].detach().exp()
    return (weights[answer] * token_losses).sum()


def relative_error(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm())


def plain_loss(of_tokens: Tensor, shares: Tensor, segment: Tensor) -> Tensor:
    """Return a loss [N] with gradient A_i grad log p_i; A_i: costs to come in token i's segment."""
    costs = (of_tokens - shares).detach()
    return costs + costs_to_come(costs, segment) * (of_tokens - of_tokens.detach())


def select_all(log_p: Tensor) -> Tensor:
    return torch.ones_like(log_p, dtype=torch.bool)


def test_the_cost_is_the_kl_of_strings_and_two_terms(toy: Answers) -> None:
    """E[L] = KL(P||Q) - H(A|X) + E[-log kappa]."""
    log_p, cost = (tensor.detach() for tensor in costs(toy))
    texts = ["".join(answer) for answer in toy.all]
    text_mass: dict[str, Tensor] = {}
    for text, logprob in zip(texts, log_p, strict=True):
        text_mass[text] = text_mass.get(text, torch.zeros(())) + logprob.exp()
    any_encoding_mass: dict[str, Tensor] = {}
    for tokens, logprob in zip(
        toy.teacher.prefixes, toy.teacher.of_answers(toy.teacher.prefixes).detach(), strict=True
    ):
        text = "".join(tokens)
        any_encoding_mass[text] = any_encoding_mass.get(text, torch.zeros(())) + logprob.exp()
    log_q = {t: q.sum() for t, q in zip(texts, toy.teacher_logprobs(), strict=True)}
    kl = sum(P * (P.log() - any_encoding_mass[text].log()) for text, P in text_mass.items())
    entropy = -sum(
        logprob.exp() * (logprob - text_mass[text].log())
        for text, logprob in zip(texts, log_p, strict=True)
    )
    kappa_term = sum(
        P * (any_encoding_mass[text].log() - log_q[text]) for text, P in text_mass.items()
    )
    assert float(sum(any_encoding_mass.values())) == pytest.approx(1, abs=EXACT)
    assert float((log_p.exp() * cost).sum()) == pytest.approx(
        float(kl - entropy + kappa_term), abs=EXACT
    )


def set_student(toy: Answers, answer_masses: Tensor) -> None:
    """Give the student probabilities proportional to those of the answers, [S]."""
    mass = {prefix: torch.zeros((), dtype=torch.float64) for prefix in toy.all}
    for answer, answer_mass in zip(toy.all, answer_masses, strict=True):
        for length in range(len(answer) + 1):
            mass[answer[:length]] = mass[answer[:length]] + answer_mass
    logits = torch.full_like(toy.student.logits, -torch.inf).detach()
    for row, prefix in enumerate(toy.all):
        for column, token in enumerate(toy.student.vocabulary):
            if token == END:
                logits[row, column] = answer_masses[row].log()
            elif (*prefix, token) in mass:
                logits[row, column] = mass[(*prefix, token)].log()
    with torch.no_grad():
        toy.student.logits.copy_(logits.clamp(min=-1e3))


@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_the_minimum_divides_a_text_among_its_spellings(toy: Answers, constant: float) -> None:
    """At p(a) ~ q(t(d(a))) the gradient of E[L] is 0; a penalty c of other spellings: e^-c."""
    q = torch.stack([logprobs.sum() for logprobs in toy.teacher_logprobs()]).exp()
    penalty = torch.where(toy.canonical(), 0.0, constant).double()
    set_student(toy, q * torch.exp(-penalty))
    log_p, cost = costs(toy)
    mean_gradient = gradient((log_p.exp() * (cost + penalty)).sum(), toy)
    assert float(mean_gradient.abs().max()) < EXACT


def test_weight_0_for_other_spellings_is_the_generalised_kl(toy: Answers) -> None:
    """It is at most 1 where no answer is canonical, however far the student is."""
    log_p, cost = costs(toy)
    is_canonical, q = toy.canonical(), (log_p - cost).detach()
    p = log_p.exp()[is_canonical]
    exact = gradient((p * cost[is_canonical] - p + q[is_canonical].exp()).sum(), toy)
    of_tokens, answer = toy.of_tokens()
    whole_loss = torch.where(is_canonical, cost, 0.0).detach()[answer] * of_tokens
    assert relative_error(gradient(mean_loss(whole_loss, toy, answer), toy), exact) < EXACT
    # Costs to come of canonical answers alone are biased: a later token decides the spelling.
    shares = toy.shares_to_the_end()
    partial_loss = plain_loss(of_tokens, shares, answer) * is_canonical[answer]
    bias = relative_error(gradient(mean_loss(partial_loss, toy, answer), toy), exact)
    print(f"other spellings left out: {bias:.0%}")
    assert bias > 0.03
    set_student(toy, torch.where(is_canonical, 1e-12, 1.0).double())
    p = costs(toy)[0].exp()[is_canonical]
    value = (p * (p.log() - q[is_canonical]) - p + q[is_canonical].exp()).sum()
    assert 0.9 * float(q[is_canonical].exp().sum()) < float(value.detach()) < 1


def test_the_cost_of_the_answer_at_every_token_is_unbiased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    _, cost = costs(toy)
    mean_gradient = gradient(mean_loss(of_tokens * cost.detach()[answer], toy, answer), toy)
    assert relative_error(mean_gradient, exact_gradient(toy)) < EXACT


def test_the_answer_form_is_unbiased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    loss = plain_loss(of_tokens, toy.shares_to_the_end(), answer)
    assert relative_error(gradient(mean_loss(loss, toy, answer), toy), exact_gradient(toy)) < EXACT
    log_p, cost = costs(toy)
    value = float(mean_loss(loss, toy, answer).detach())
    assert value == pytest.approx(float((log_p.exp() * cost).sum().detach()), abs=EXACT)


def test_chunk_sums_to_the_end_are_biased(toy: Answers) -> None:
    """A later token decides whether an earlier boundary exists."""
    of_tokens, answer = toy.of_tokens()
    chunk, of_chunk, _ = toy.chunks()
    last = torch.ones_like(chunk, dtype=torch.bool)
    last[:-1] = chunk[1:] != chunk[:-1]
    loss = plain_loss(of_tokens, torch.where(last, of_chunk, 0.0), answer)
    bias = relative_error(gradient(mean_loss(loss, toy, answer), toy), exact_gradient(toy))
    print(f"chunk sums to the end: {bias:.0%}")
    assert bias > 0.03


def test_equal_division_of_a_chunk_is_biased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    _, of_chunk, size = toy.chunks()
    shares = of_chunk / torch.tensor(size)
    loss = plain_loss(of_tokens, shares, answer)
    bias = relative_error(gradient(mean_loss(loss, toy, answer), toy), exact_gradient(toy))
    print(f"equal division: {bias:.0%}")
    assert bias > 0.03


def test_costs_of_chunks_alone_are_biased(toy: Answers) -> None:
    """The minimum differs even where only the next chunk matters."""
    of_tokens, answer = toy.of_tokens()
    chunk, of_chunk, _ = toy.chunks()
    last = torch.ones_like(chunk, dtype=torch.bool)
    last[:-1] = chunk[1:] != chunk[:-1]
    loss = plain_loss(of_tokens, torch.where(last, of_chunk, 0.0), chunk)
    bias = relative_error(gradient(mean_loss(loss, toy, answer), toy), exact_gradient(toy))
    print(f"costs of chunks alone: {bias:.0%}")
    assert bias > 0.03


@pytest.fixture
def wordy() -> Answers:
    student, teacher = Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2)
    return Answers(student, teacher, greedy(TEACHER_OF_WORDS))


def test_words_to_the_end_are_unbiased(wordy: Answers) -> None:
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    arguments = (of_tokens, shares, word, answer, select_all(of_tokens))
    loss = cross_tokenizer_kl(*arguments, horizon="answer")
    exact = exact_gradient(wordy)
    assert relative_error(gradient(mean_loss(loss, wordy, answer), wordy), exact) < EXACT
    log_p, cost = costs(wordy)
    value = float(mean_loss(loss, wordy, answer).detach())
    assert value == pytest.approx(float((log_p.exp() * cost).sum().detach()), abs=EXACT)
    # A token that begins a word also ends the word before; without that word's cost it is biased.
    advantages = costs_to_come((of_tokens - shares).detach(), answer)
    partial_loss = mean_loss(advantages * of_tokens, wordy, answer)
    assert relative_error(gradient(partial_loss, wordy), exact) > 0.03


def test_a_word_is_all_that_changes_if_nothing_else_does(wordy: Answers) -> None:
    """The word form is the answer form without the words after that of the token."""
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    cost = (of_tokens - shares).detach()
    advantages = word_advantages(cost, word, answer, "word")
    for i in range(0, len(cost), 7):
        is_relevant = word == word[i]
        if i and word[i - 1] != word[i] and answer[i - 1] == answer[i]:
            is_relevant |= word == word[i - 1]
        assert float(advantages[i]) == pytest.approx(float(cost[is_relevant].sum()), abs=EXACT)


def rows_of_matches(toy: Answers) -> tuple[Rows, Rows, Tensor]:
    """Return rows of every token at the student's ids that are one teacher token, or the end.

    Also return which sampled tokens are among them. After 5 bytes, only the end is possible.
    """
    shared = [token for token in toy.student.vocabulary if token in toy.teacher.vocabulary]
    student_ids = [toy.student.vocabulary.index(token) for token in shared]
    teacher_ids = [toy.teacher.vocabulary.index(token) for token in shared]
    p, q = toy.student.logprobs(), toy.teacher.logprobs().detach()
    student_rows, teacher_rows, token_columns = [], [], []
    for answer in toy.all:
        for i, (row, column) in enumerate(toy.student.places(answer)):
            prefix_encoding = toy.encode("".join(answer[:i]))
            student_rows.append(row)
            teacher_rows.append(toy.teacher.places(prefix_encoding)[-1][0])
            token_columns.append(column)
    student, teacher = p[student_rows], q[teacher_rows]
    sampled_ids = torch.tensor(token_columns)
    match = {student_ids[i]: teacher_ids[i] for i in range(len(shared))}
    in_head = torch.tensor([column in match for column in token_columns])
    teacher_tokens = torch.tensor([match.get(column, 0) for column in token_columns])

    def rows(table: Tensor, head: list[int], tokens: Tensor) -> Rows:
        tail_ids = [i for i in range(table.shape[1]) if i not in head]
        tail = table[:, tail_ids]
        empty = (tail == -torch.inf).all(1)
        safe = torch.where(empty[:, None], 0.0, tail).logsumexp(1)
        return Rows(
            table[:, head],
            torch.where(empty, -torch.inf, safe),
            table.gather(1, tokens[:, None])[:, 0],
        )

    return (
        rows(student, student_ids, sampled_ids),
        rows(teacher, teacher_ids, teacher_tokens),
        in_head,
    )


def test_importance_weights_multiply_the_gradient(wordy: Answers) -> None:
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    weights = torch.rand(len(word), generator=torch.Generator().manual_seed(0)).double() + 0.5
    arguments = (of_tokens, shares, word, answer, select_all(of_tokens))
    weighted_loss = cross_tokenizer_kl(*arguments, horizon="word", importance=weights) / weights
    unweighted_loss = cross_tokenizer_kl(*arguments, horizon="word")
    weighted_gradient, unweighted_gradient = (
        gradient(mean_loss(loss, wordy, answer), wordy) for loss in (weighted_loss, unweighted_loss)
    )
    assert relative_error(weighted_gradient, unweighted_gradient) < EXACT


def test_matched_tokens_alone_are_biased(toy: Answers) -> None:
    """GOLD's loss of matched tokens, with all other tokens in one bucket."""
    _, answer = toy.of_tokens()
    student, teacher, in_head = rows_of_matches(toy)
    matched = topk_kl(student, teacher, in_head, direction="reverse", tail="bucket")
    bias = relative_error(gradient(mean_loss(matched, toy, answer), toy), exact_gradient(toy))
    print(f"matched tokens: {bias:.0%}")
    assert bias > 0.1


def minimize_loss(form: str) -> float:
    """Return E[L] after minimisation with the mean gradient of a form by Adam."""
    student, teacher = Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2)
    toy = Answers(student, teacher, greedy(TEACHER_OF_WORDS))
    word, of_words = toy.words()
    chunk, of_chunk, _ = toy.chunks()
    is_last = torch.ones_like(chunk, dtype=torch.bool)
    is_last[:-1] = chunk[1:] != chunk[:-1]
    adam = torch.optim.Adam([toy.student.logits], lr=0.1)
    for _ in range(150):
        of_tokens, answer = toy.of_tokens()
        if form == "chunk":
            loss = plain_loss(of_tokens, torch.where(is_last, of_chunk, 0.0), chunk)
        else:
            arguments = (of_tokens, of_words, word, answer, select_all(of_tokens))
            loss = cross_tokenizer_kl(*arguments, horizon="word" if form == "word" else "answer")
        adam.zero_grad()
        mean_loss(loss, toy, answer).backward()
        adam.step()
    log_p, cost = costs(toy)
    return float((log_p.exp() * cost).sum().detach())


@pytest.mark.slow
def test_where_the_forms_lead() -> None:
    """The word form nearly reaches the minimum, the chunk form does not."""
    minima = {form: minimize_loss(form) for form in ("answer", "word", "chunk")}
    print({form: round(value, 3) for form, value in minima.items()})
    assert minima["word"] - minima["answer"] < 0.02
    assert minima["chunk"] - minima["answer"] > 0.5
