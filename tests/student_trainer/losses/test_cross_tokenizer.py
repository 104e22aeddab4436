"""Losses of two tokenizers, enumerated: every answer of at most 5 bytes over two letters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from student_trainer.losses import (
    Horizon,
    MatchedHead,
    Rows,
    controlled_topk_kl,
    cross_tokenizer_kl,
    topk_kl,
)
from student_trainer.losses.cross_tokenizer import costs_to_come, word_advantages
from tests.student_trainer.losses.toy_tokenizers import (
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
    (found,) = torch.autograd.grad(value, toy.student.logits, retain_graph=True)
    return found


def costs(toy: Answers) -> tuple[Tensor, Tensor]:
    """log p and L of every answer, [S]; gradients flow through both."""
    log_p = toy.student.of_answers(toy.all)
    return log_p, log_p - torch.stack([q.sum() for q in toy.teacher_logprobs()])


def exact_gradient(toy: Answers) -> Tensor:
    """Of E[L]."""
    log_p, cost = costs(toy)
    return gradient((log_p.exp() * cost).sum(), toy)


def expected(of_tokens: Tensor, toy: Answers, answer: Tensor) -> Tensor:
    """The mean over all answers of the sum of a loss of tokens [N]."""
    weights = costs(toy)[0].detach().exp()
    return (weights[answer] * of_tokens).sum()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def plain(of_tokens: Tensor, shares: Tensor, segment: Tensor) -> Tensor:
    """A_i grad log p_i with A_i the costs from token i to the end of its segment, [N]."""
    costs = (of_tokens - shares).detach()
    return costs + costs_to_come(costs, segment) * (of_tokens - of_tokens.detach())


def everything(log_p: Tensor) -> Tensor:
    return torch.ones_like(log_p, dtype=torch.bool)


def test_the_cost_is_the_kl_of_strings_and_two_terms(toy: Answers) -> None:
    """E[L] = KL(P||Q) - H(A|X) + E[-log kappa]."""
    log_p, cost = (of.detach() for of in costs(toy))
    texts = ["".join(answer) for answer in toy.all]
    of_text: dict[str, Tensor] = {}
    for text, one in zip(texts, log_p, strict=True):
        of_text[text] = of_text.get(text, torch.zeros(())) + one.exp()
    in_any_encoding: dict[str, Tensor] = {}
    for tokens, one in zip(
        toy.teacher.prefixes, toy.teacher.of_answers(toy.teacher.prefixes).detach(), strict=True
    ):
        text = "".join(tokens)
        in_any_encoding[text] = in_any_encoding.get(text, torch.zeros(())) + one.exp()
    log_q = {t: q.sum() for t, q in zip(texts, toy.teacher_logprobs(), strict=True)}
    kl = sum(P * (P.log() - in_any_encoding[text].log()) for text, P in of_text.items())
    entropy = -sum(
        one.exp() * (one - of_text[text].log()) for text, one in zip(texts, log_p, strict=True)
    )
    of_kappa = sum(P * (in_any_encoding[text].log() - log_q[text]) for text, P in of_text.items())
    assert float(sum(in_any_encoding.values())) == pytest.approx(1, abs=EXACT)
    assert float((log_p.exp() * cost).sum()) == pytest.approx(
        float(kl - entropy + of_kappa), abs=EXACT
    )


def set_student(toy: Answers, of_answers: Tensor) -> None:
    """Give the student probabilities proportional to those of the answers, [S]."""
    mass = {prefix: torch.zeros((), dtype=torch.float64) for prefix in toy.all}
    for answer, of_answer in zip(toy.all, of_answers, strict=True):
        for length in range(len(answer) + 1):
            mass[answer[:length]] = mass[answer[:length]] + of_answer
    logits = torch.full_like(toy.student.logits, -torch.inf).detach()
    for row, prefix in enumerate(toy.all):
        for column, token in enumerate(toy.student.vocabulary):
            if token == END:
                logits[row, column] = of_answers[row].log()
            elif (*prefix, token) in mass:
                logits[row, column] = mass[(*prefix, token)].log()
    with torch.no_grad():
        toy.student.logits.copy_(logits.clamp(min=-1e3))


@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_the_minimum_divides_a_text_among_its_spellings(toy: Answers, constant: float) -> None:
    """At p(a) ~ q(t(d(a))) the gradient of E[L] is 0; a constant for other spellings: e^-c."""
    q = torch.stack([one.sum() for one in toy.teacher_logprobs()]).exp()
    more = torch.where(toy.canonical(), 0.0, constant).double()
    set_student(toy, q * torch.exp(-more))
    log_p, cost = costs(toy)
    found = gradient((log_p.exp() * (cost + more)).sum(), toy)
    assert float(found.abs().max()) < EXACT


def test_weight_0_for_other_spellings_is_the_generalised_kl(toy: Answers) -> None:
    """Which is at most 1 where no answer is canonical, however far the student is."""
    log_p, cost = costs(toy)
    kept, q = toy.canonical(), (log_p - cost).detach()
    p = log_p.exp()[kept]
    wanted = gradient((p * cost[kept] - p + q[kept].exp()).sum(), toy)
    of_tokens, answer = toy.of_tokens()
    whole = torch.where(kept, cost, 0.0).detach()[answer] * of_tokens
    assert error(gradient(expected(whole, toy, answer), toy), wanted) < EXACT
    # Of canonical answers, only what is to come: another spelling later depends on the future.
    shares = toy.shares_to_the_end()
    part = plain(of_tokens, shares, answer) * kept[answer]
    bias = error(gradient(expected(part, toy, answer), toy), wanted)
    print(f"other spellings left out: {bias:.0%}")
    assert bias > 0.03
    set_student(toy, torch.where(kept, 1e-12, 1.0).double())
    p = costs(toy)[0].exp()[kept]
    value = (p * (p.log() - q[kept]) - p + q[kept].exp()).sum()
    assert 0.9 * float(q[kept].exp().sum()) < float(value.detach()) < 1


def test_the_cost_of_the_answer_at_every_token_is_unbiased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    _, cost = costs(toy)
    found = gradient(expected(of_tokens * cost.detach()[answer], toy, answer), toy)
    assert error(found, exact_gradient(toy)) < EXACT


def test_the_answer_form_is_unbiased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    loss = plain(of_tokens, toy.shares_to_the_end(), answer)
    assert error(gradient(expected(loss, toy, answer), toy), exact_gradient(toy)) < EXACT
    log_p, cost = costs(toy)
    value = float(expected(loss, toy, answer).detach())
    assert value == pytest.approx(float((log_p.exp() * cost).sum().detach()), abs=EXACT)


def test_chunk_sums_to_the_end_are_biased(toy: Answers) -> None:
    """A later token decides whether an earlier boundary exists."""
    of_tokens, answer = toy.of_tokens()
    chunk, of_chunk, _ = toy.chunks()
    last = torch.ones_like(chunk, dtype=torch.bool)
    last[:-1] = chunk[1:] != chunk[:-1]
    loss = plain(of_tokens, torch.where(last, of_chunk, 0.0), answer)
    bias = error(gradient(expected(loss, toy, answer), toy), exact_gradient(toy))
    print(f"chunk sums to the end: {bias:.0%}")
    assert bias > 0.03


def test_equal_division_of_a_chunk_is_biased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    _, of_chunk, size = toy.chunks()
    shares = of_chunk / torch.tensor(size)
    loss = plain(of_tokens, shares, answer)
    bias = error(gradient(expected(loss, toy, answer), toy), exact_gradient(toy))
    print(f"equal division: {bias:.0%}")
    assert bias > 0.03


def test_costs_of_chunks_alone_are_biased(toy: Answers) -> None:
    """Even where nothing but the next chunk matters: the minimum is another one."""
    of_tokens, answer = toy.of_tokens()
    chunk, of_chunk, _ = toy.chunks()
    last = torch.ones_like(chunk, dtype=torch.bool)
    last[:-1] = chunk[1:] != chunk[:-1]
    loss = plain(of_tokens, torch.where(last, of_chunk, 0.0), chunk)
    bias = error(gradient(expected(loss, toy, answer), toy), exact_gradient(toy))
    print(f"costs of chunks alone: {bias:.0%}")
    assert bias > 0.03


@pytest.fixture
def wordy() -> Answers:
    student, teacher = Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2)
    return Answers(student, teacher, greedy(TEACHER_OF_WORDS))


def test_words_to_the_end_are_unbiased(wordy: Answers) -> None:
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    of = (of_tokens, shares, word, answer, everything(of_tokens))
    loss = cross_tokenizer_kl(*of, horizon="answer")
    wanted = exact_gradient(wordy)
    assert error(gradient(expected(loss, wordy, answer), wordy), wanted) < EXACT
    log_p, cost = costs(wordy)
    value = float(expected(loss, wordy, answer).detach())
    assert value == pytest.approx(float((log_p.exp() * cost).sum().detach()), abs=EXACT)
    # A token that begins a word has ended the one before: without the cost of that it is biased.
    advantages = costs_to_come((of_tokens - shares).detach(), answer)
    without = expected(advantages * of_tokens, wordy, answer)
    assert error(gradient(without, wordy), wanted) > 0.03


def test_a_word_is_all_that_changes_if_nothing_else_does(wordy: Answers) -> None:
    """The word form is the answer form without the words after that of the token."""
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    cost = (of_tokens - shares).detach()
    found = word_advantages(cost, word, answer, "word")
    for i in range(0, len(cost), 7):
        mine = word == word[i]
        if i and word[i - 1] != word[i] and answer[i - 1] == answer[i]:
            mine |= word == word[i - 1]
        assert float(found[i]) == pytest.approx(float(cost[mine].sum()), abs=EXACT)


def rows_of_matches(toy: Answers) -> tuple[Rows, Rows, Tensor, Tensor]:
    """Rows of every token at the student's ids that are one teacher token, or the end.

    Also which sampled tokens are among them, and whether the teacher's encoding of the text before
    lies on that of the answer. In the teacher's rows after 5 bytes only the end is left.
    """
    shared = [token for token in toy.student.vocabulary if token in toy.teacher.vocabulary]
    ours = [toy.student.vocabulary.index(token) for token in shared]
    theirs = [toy.teacher.vocabulary.index(token) for token in shared]
    p, q = toy.student.logprobs(), toy.teacher.logprobs().detach()
    at, of_teacher, token, on_path = [], [], [], []
    for answer in toy.all:
        encoded = toy.encode("".join(answer))
        for i, (row, column) in enumerate(toy.student.places(answer)):
            before = toy.encode("".join(answer[:i]))
            at.append(row)
            of_teacher.append(toy.teacher.places(before)[-1][0])
            token.append(column)
            on_path.append(encoded[: len(before)] == before)
    student, teacher = p[at], q[of_teacher]
    columns = torch.tensor(token)
    match = {ours[i]: theirs[i] for i in range(len(shared))}
    in_head = torch.tensor([one in match for one in token])
    other = torch.tensor([match.get(one, 0) for one in token])

    def rows(table: Tensor, head: list[int], tokens: Tensor) -> Rows:
        rest = [i for i in range(table.shape[1]) if i not in head]
        tail = table[:, rest]
        empty = (tail == -torch.inf).all(1)
        safe = torch.where(empty[:, None], 0.0, tail).logsumexp(1)
        return Rows(
            table[:, head],
            torch.where(empty, -torch.inf, safe),
            table.gather(1, tokens[:, None])[:, 0],
        )

    return (
        rows(student, ours, columns),
        rows(teacher, theirs, other),
        in_head,
        torch.tensor(on_path),
    )


def test_the_control_variate_is_unbiased(toy: Answers) -> None:
    of_tokens, answer = toy.of_tokens()
    advantages = costs_to_come((of_tokens - toy.shares_to_the_end()).detach(), answer)
    student, teacher, in_head, on_path = rows_of_matches(toy)
    loss = controlled_topk_kl(student, teacher, in_head, advantages)
    wanted = exact_gradient(toy)
    assert error(gradient(expected(loss, toy, answer), toy), wanted) < EXACT
    # Only where the prefix lies on the path of the answer: the future chooses the estimator.
    plain = (of_tokens - of_tokens.detach()) * advantages
    student, teacher, in_head, _ = rows_of_matches(toy)
    mixed = torch.where(on_path, controlled_topk_kl(student, teacher, in_head, advantages), plain)
    bias = error(gradient(expected(mixed, toy, answer), toy), wanted)
    print(f"control variate where it fits: {bias:.0%}")
    assert bias > 0.01


def heads_of_words(toy: Answers, *, within: bool = False) -> MatchedHead:
    """S of every token that begins a word: ids that begin one, and are one teacher token.

    `within`: also within words, where the teacher's encoding of the text before lies on that of the
    answer.
    """
    ours, theirs = toy.student.vocabulary, toy.teacher.vocabulary
    p, q = toy.student.logprobs(), toy.teacher.logprobs().detach()
    at, of_teacher, token, matched = [], [], [], []
    for answer in toy.all:
        encoded = (*toy.encode("".join(answer)), END)
        for i, (row, column) in enumerate(toy.student.places(answer)):
            before = "".join(answer[:i])
            known = toy.encode(before)
            fits = [
                u in theirs and (within or not before or (before[-1] != " " and u[:1] in ("", " ")))
                for u in ours
            ]
            used = fits[column] and encoded[: len(known)] == known
            at.append(row)
            of_teacher.append(toy.teacher.places(known)[-1][0])
            token.append(column)
            matched.append([used and one for one in fits])
    columns = [theirs.index(u) if u in theirs else 0 for u in ours]
    written = torch.nn.functional.one_hot(torch.tensor(token), len(ours)).bool()
    return MatchedHead(p[at], q[of_teacher][:, columns], torch.tensor(matched), written)


def controlled(toy: Answers, horizon: Horizon, head: MatchedHead | None) -> Tensor:
    of_tokens, answer = toy.of_tokens()
    word, shares = toy.words()
    of = (of_tokens, shares, word, answer, everything(of_tokens))
    return cross_tokenizer_kl(*of, horizon=horizon, head=head)


@pytest.fixture(params=[TEACHER_OF_WORDS, ("a", " ", " a", "aaa")])
def words_of(request: pytest.FixtureRequest) -> Answers:
    student, teacher = Table(STUDENT_OF_WORDS, 1), Table(request.param, 2)
    return Answers(student, teacher, greedy(request.param))


@pytest.mark.parametrize("horizon", ["word", "answer"])
def test_heads_of_words_do_not_change_the_mean(words_of: Answers, horizon: Horizon) -> None:
    _, answer = words_of.of_tokens()

    def mean(head: MatchedHead | None) -> Tensor:
        return gradient(expected(controlled(words_of, horizon, head), words_of, answer), words_of)

    head = heads_of_words(words_of)
    assert bool((head.matched.sum(1) > 1).any())
    assert error(mean(head), mean(None)) < EXACT
    if horizon == "answer":
        assert error(mean(head), exact_gradient(words_of)) < EXACT
    # Within a word, whether the text before is encoded alike depends on the token.
    bias = error(mean(heads_of_words(words_of, within=True)), mean(None))
    print(f"heads within words, {horizon}: {bias:.0%}")
    assert bias > 0.01


@pytest.mark.parametrize("horizon", ["word", "answer"])
def test_heads_of_words_lower_the_variance(words_of: Answers, horizon: Horizon) -> None:
    """Of an answer's gradient, summed over all parameters."""
    _, answer = words_of.of_tokens()
    p = costs(words_of)[0].detach().exp()
    found = []
    for head in (None, heads_of_words(words_of)):
        loss = controlled(words_of, horizon, head)
        of_answers = torch.zeros(len(p), dtype=loss.dtype).index_add(0, answer, loss)
        every = torch.stack([gradient(one, words_of) for one in of_answers]).flatten(1)
        found.append(float(p @ (every - p @ every).square().sum(1)))
    print(f"variance of the gradient, {horizon}: {found[0]:.3f} -> {found[1]:.3f}")
    assert found[1] < 0.9 * found[0]


def test_importance_weights_multiply_the_control_variate_too(wordy: Answers) -> None:
    of_tokens, answer = wordy.of_tokens()
    word, shares = wordy.words()
    weights = torch.rand(len(word), generator=torch.Generator().manual_seed(0)).double() + 0.5
    of = (of_tokens, shares, word, answer, everything(of_tokens))
    options: dict[str, Any] = {"horizon": "word", "head": heads_of_words(wordy)}
    weighted = cross_tokenizer_kl(*of, **options, importance=weights) / weights
    plain = cross_tokenizer_kl(*of, **options)
    one, other = (gradient(expected(loss, wordy, answer), wordy) for loss in (weighted, plain))
    assert error(one, other) < EXACT


def test_matched_tokens_alone_are_biased(toy: Answers) -> None:
    """GOLD's part of matched tokens, with the rest in one bucket."""
    _, answer = toy.of_tokens()
    student, teacher, in_head, _ = rows_of_matches(toy)
    matched = topk_kl(student, teacher, in_head, direction="reverse", tail="bucket")
    bias = error(gradient(expected(matched, toy, answer), toy), exact_gradient(toy))
    print(f"matched tokens: {bias:.0%}")
    assert bias > 0.1


def test_with_one_tokenizer_the_control_variate_is_bucket_and_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(7, 9, dtype=torch.float64, generator=generator).log_softmax(1) for _ in range(2)
    )
    p.requires_grad_()
    tokens = torch.tensor([0, 3, 8, 1, 2, 5, 7])

    def rows(table: Tensor) -> Rows:
        own = table.gather(1, tokens[:, None])[:, 0]
        return Rows(table[:, :4], table[:, 4:].logsumexp(1), own)

    student, teacher, in_head = rows(p), rows(q), tokens < 4
    cost = (student.token_logprobs - teacher.token_logprobs).detach()
    found = controlled_topk_kl(student, teacher, in_head, cost).sum()
    wanted = topk_kl(student, teacher, in_head, direction="reverse", tail="bucket+sampled").sum()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=EXACT)
    one, other = (torch.autograd.grad(value, p, retain_graph=True)[0] for value in (found, wanted))
    assert float((one - other).abs().max()) < EXACT


def minimum(form: str) -> float:
    """E[L] after Adam has followed the mean of the form's gradient."""
    student, teacher = Table(STUDENT_OF_WORDS, 1), Table(TEACHER_OF_WORDS, 2)
    toy = Answers(student, teacher, greedy(TEACHER_OF_WORDS))
    word, of_words = toy.words()
    chunk, of_chunk, _ = toy.chunks()
    last = torch.ones_like(chunk, dtype=torch.bool)
    last[:-1] = chunk[1:] != chunk[:-1]
    adam = torch.optim.Adam([toy.student.logits], lr=0.1)
    for _ in range(150):
        of_tokens, answer = toy.of_tokens()
        if form == "chunk":
            loss = plain(of_tokens, torch.where(last, of_chunk, 0.0), chunk)
        else:
            of = (of_tokens, of_words, word, answer, everything(of_tokens))
            loss = cross_tokenizer_kl(*of, horizon="word" if form == "word" else "answer")
        adam.zero_grad()
        expected(loss, toy, answer).backward()
        adam.step()
    log_p, cost = costs(toy)
    return float((log_p.exp() * cost).sum().detach())


def test_where_the_forms_lead() -> None:
    """That of words nearly to the minimum, that of chunks elsewhere."""
    found = {form: minimum(form) for form in ("answer", "word", "chunk")}
    print({form: round(value, 3) for form, value in found.items()})
    assert found["word"] - found["answer"] < 0.02
    assert found["chunk"] - found["answer"] > 0.5
