"""Losses between a student and a teacher of another tokenizer.

An answer has the student tokens a, the bytes x = d(a), and the teacher's encoding b = t(x) of these
bytes, all with the token that ends the answer. Its cost is L(a) = log p(a) - log q(b). With
kappa(x) = q(t(x)) / Q(x), where Q(x) is the probability of the bytes in any of their encodings,

    E[L] = KL(P||Q) - H(A|X) + E[-log kappa(X)]

The entropy H(A|X) rewards spelling the same bytes in many ways: the minimum is p(a) ~ q(t(d(a))). A
constant c in the cost of an answer that is not the student's canonical encoding of its bytes makes
the odds of such spellings e^-c at the minimum. With weight 0 for them the gradient would be that of
the generalised KL, the sum over canonical a of p log(p/q) - p + q. Its minimum is p = q, but it is
at most 1 nat where no answer is canonical: a student with a larger KL learns other spellings.

A token's advantage is the part of the cost that the token can change:

    A_i = sum_{j >= i} log p_j - sum_{j >= sigma_i} log q_j

sigma_i is the number of teacher tokens that are the same for every continuation of the bytes before
token i. This is unbiased for the gradient of E[L]. It is not without the tokens between sigma_i and
i: a later student token may decide whether an earlier boundary of the teacher exists. So sums over
chunks are biased, from that of token i on or of that alone, and so is an equal division of a
chunk's log q among its student tokens.

Here sigma_i counts the tokens before the last word that has begun before token i. That is the word
of token i, or the one before if token i begins a word: it has decided that the other ends. With
K_w = log p - log q of all tokens of word w,

    answer  A_i = sum of K_w from that word to the end of the answer
    word    A_i = sum of K_w from that word to the word of token i

The log p before token i that K_w contains do not change the mean. The second form ignores, like the
KL of tokens with one tokenizer, that a token changes what comes later, and has less variance.

Where token i begins a word, rows lower the variance (`MatchedHead`). Let S be ids of the student
that begin a word too, each with the bytes of one token v of the teacher. Whichever of them comes,
the text before is encoded alike, so q(v) is in the teacher's row there. If a_i is in S, subtract

    sum_{u in S} h(u) (1[u = a_i] - p(u) / p(S)) grad log p(u),    h(u) = log p(u) - log q(v) + K

with K the cost of the word that has ended. Its mean over a_i in S is 0, whatever h is. Only the
word's other tokens and, for "answer", later words are left in the factor of grad log p(a_i).

Of a store, the teacher has written the answers: tokens b, bytes x, and a = s(x) is the encoding of
the student. The gradient of the mean of -log p(a) is that of the forward KL, and needs no log q.
`mapped_kl` has the same mean gradient and less variance, because it reads the rows of the teacher
where words begin: its head ids become the first tokens of the student's encodings of them.
`chunk_divergence` compares the likelihoods of the runs of both, as ALM does (arXiv 2503.20083).

`tests/student_trainer/losses/test_cross_tokenizer.py` enumerates all of this, and
`test_stored_answers.py` beside it the last part. A chunk is a shortest run of student tokens with
the bytes of a run of teacher tokens; `clients/alignment/alignment.py` has words too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from student_trainer.losses.advantages import gae
from student_trainer.losses.rows import LOWEST_LOGPROB, Rows
from student_trainer.losses.topk import topk_kl

# How far the costs reach that a token answers for.
Horizon = Literal["word", "answer"]
# The runs of tokens whose likelihoods `chunk_divergence` compares.
Unit = Literal["chunk", "word"]
# ALM's temperature.
UNIT_TEMPERATURE = 100.0
# The least -log of a likelihood: below it, float32 does not tell a probability from 1.
_SURE = 1e-6


@dataclass(frozen=True)
class MatchedHead:
    """Head ids of N tokens, for the control variate of those that begin a word.

    student_logprobs [N, K]: log p; the gradient flows through them. teacher_logprobs [N, K]: log q
    of the same bytes, where matched. matched [N, K] bool: the set S of each token, without ids for
    a token that begins no word. written [N, K] bool: the id is the token.
    """

    student_logprobs: Tensor
    teacher_logprobs: Tensor
    matched: Tensor
    written: Tensor


def cross_tokenizer_kl(
    student_logprobs: Tensor,
    teacher_shares: Tensor,
    word: Tensor,
    answer: Tensor,
    learned: Tensor,
    *,
    horizon: Horizon,
    importance: Tensor | None = None,
    head: MatchedHead | None = None,
) -> Tensor:
    """Return the cost of each token, [N] in nats, with the gradient A_i grad log p_i.

    `student_logprobs` [N]: of the sampled tokens; the gradient flows through them. `teacher_shares`
    [N]: log q of the words, divided among their tokens in any way. `word`, `answer` [N] int64,
    below N: the word of each token, another number in each answer, and its answer; the tokens of
    both are adjacent, in order, and all in the call. `learned` [N] bool: other tokens have neither
    cost nor gradient. `importance` [N]: the detached p/mu if another policy mu sampled the tokens;
    it multiplies the gradient. None: 1. `head`: changes no mean, but the variance of the gradient.

    The costs of a word have the sum K_w. Their mean is no KL of a single token.
    """
    log_p = student_logprobs.clamp(min=LOWEST_LOGPROB)
    none = torch.zeros_like(log_p.detach())
    costs = torch.where(learned, (log_p - teacher_shares).detach(), none)
    weights, others = word_advantages(costs, word, answer, horizon), none
    if head is not None:
        known, others = _controls(head, costs_before(costs, word, answer))
        weights = weights - known
    gradient = weights * (log_p - log_p.detach()) + others
    if importance is not None:
        gradient = importance.detach() * gradient
    return costs + torch.where(learned, gradient, none)


def _controls(head: MatchedHead, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return h(a_i) [N], and the sum over S of p(u) / p(S) h(u) log p(u) [N], whose value is 0.

    Both are 0 for a token that is not in S. `before` [N]: the cost of the word that has ended.
    """
    used = head.matched & (head.matched & head.written).any(1, keepdim=True)
    log_p, log_q = (
        torch.where(used, of.clamp(min=LOWEST_LOGPROB), torch.zeros_like(of))
        for of in (head.student_logprobs, head.teacher_logprobs)
    )
    known = torch.where(used, (log_p - log_q).detach() + before[:, None], torch.zeros_like(log_p))
    within = log_p.detach().masked_fill(~used, LOWEST_LOGPROB).softmax(1)
    others = (within * known * (log_p - log_p.detach())).sum(1)
    return (known * head.written).sum(1), others


def word_advantages(costs: Tensor, word: Tensor, answer: Tensor, horizon: Horizon) -> Tensor:
    """Return A_i of each token, [N]. `costs` [N]: log p minus shares; the rest as above."""
    of_words = torch.zeros_like(costs).index_add(0, word, costs)
    found = of_words[word] + costs_before(costs, word, answer)
    if horizon == "answer":
        found += costs_to_come(costs, answer) - costs_to_come(costs, word)
    return found


def costs_before(costs: Tensor, word: Tensor, answer: Tensor) -> Tensor:
    """Return the cost of the word before, [N], at tokens that begin another of the same answer."""
    of_words = torch.zeros_like(costs).index_add(0, word, costs)
    begins = (word[1:] != word[:-1]) & (answer[1:] == answer[:-1])
    found = torch.zeros_like(costs)
    found[1:] = torch.where(begins, of_words[word[:-1]], found[1:])
    return found


def costs_to_come(costs: Tensor, segment: Tensor) -> Tensor:
    """Return the sum of the costs from each token to the end of its segment, [N]; no gradient.

    `segment` [N] int64: the tokens of a segment are adjacent.
    """
    return gae(costs, torch.zeros_like(costs), segment, gamma=1.0, lam=1.0)[0]


def mapped_kl(student: Rows, teacher_shares: Tensor, weights: Tensor, learned: Tensor) -> Tensor:
    """Return the loss of each token, [N] in nats, of answers that the teacher has written.

    Let token i begin a word, and with it token b_t of the teacher, whose row has the head ids v
    with the probabilities q. C are the head ids that begin a word too, and m(v) is the first token
    of the student's encoding of the bytes of v. If b_t is in C, the loss of token i is

        share_i - log p(a_i) - sum_{v in C} w_v log p(m(v)),    w_v = q(v) / q(C) - 1[v = b_t]

    and otherwise, and for tokens within words, share_i - log p(a_i). The sum is a control variate:
    its mean over b_t in C is 0, whatever m is, because a word that begins changes no token before
    it. So the gradient has the mean of that of -log p(a_i), with any head; where m(b_t) = a_i, as
    at nearly all words, it is that of a cross-entropy over C. Within a word, whether the two have
    a boundary in common depends on b_t: there the mean would not be 0.

    student: Rows of N; `sample_logprobs` [N, M] at the ids m(v), which may be repeated.
    `teacher_shares` [N]: log q of the answers, and w_v log q(v), divided among the tokens in any
    way; no gradient. `weights` [N, M]: w_v. `learned` [N] bool: other tokens have no loss.
    """
    assert student.sample_logprobs is not None
    log_p = student.token_logprobs.clamp(min=LOWEST_LOGPROB)
    mapped = student.sample_logprobs.clamp(min=LOWEST_LOGPROB)
    losses = teacher_shares - log_p - (weights * mapped).sum(1)
    return torch.where(learned, losses, torch.zeros_like(losses))


def chunk_divergence(
    student_logprobs: Tensor,
    teacher_shares: Tensor,
    unit: Tensor,
    learned: Tensor,
    *,
    temperature: float = UNIT_TEMPERATURE,
) -> Tensor:
    """Return the divergence of each run of tokens, [N] in nats, at its first token; 0 at others.

    With p and q the student's and the teacher's probability of a run given what is before it, and t
    the `temperature`, it is ALM's binarised KL (arXiv 2503.20083, section 3), times t:

        t (a log(a/b) + (1 - a) log((1 - a)/(1 - b))),    a = q^(1/t), b = p^(1/t)

    It is 0 at p = q only. For a large t it tends to l_p - l_q - l_q log(l_p/l_q), with l = -log: to
    the gradient of the cross-entropy times 1 - l_q/l_p, so that a run which the teacher finds as
    unlikely as the student does is not made likelier.

    `student_logprobs` [N]: the gradient flows through them. `teacher_shares` [N]: log q of the
    runs, divided among their tokens in any way. `unit` [N] int64, below N: the run of each token,
    another number in each answer; the tokens of a run are adjacent, and all in the call. `learned`
    [N] bool: the same for all tokens of a run; others have neither divergence nor gradient.
    """
    none = torch.zeros_like(student_logprobs)
    log_p, log_q = (
        none.index_add(0, unit, torch.where(learned, of.clamp(min=LOWEST_LOGPROB), none))
        for of in (student_logprobs, teacher_shares)
    )
    log_b, log_a = (of.clamp(max=-_SURE) / temperature for of in (log_p, log_q))
    a, other_a = log_a.exp(), -log_a.expm1()
    of_units = a * (log_a - log_b) + other_a * (other_a.log() - (-log_b.expm1()).log())
    first = torch.ones_like(learned)
    first[1:] = unit[1:] != unit[:-1]
    return temperature * torch.where(first & learned, of_units[unit], none)


def controlled_topk_kl(
    student: Rows, teacher: Rows, token_in_head: Tensor, advantages: Tensor
) -> Tensor:
    """Return a loss [N] with the mean gradient of A_i grad log p_i, and less variance if q is near.

        J_i = sum_{u in S} p(u) (log p(u) - sg log q(v(u))) + P_t log(P_t/Q_t)
              + r_i sg(A_i - l(a_i))

    S are ids u of the student whose bytes are one token v(u) of the teacher. l(a_i) is the log of
    p/q if a_i is in S, otherwise log(P_t/Q_t); r_i = p_i / sg(p_i). The rows of the teacher, at the
    ids v(u) and the token v(a_i), must be those after its encoding of the bytes before token i,
    whether or not that is the beginning of its encoding of the answer: choosing the tokens by this
    is biased. `token_in_head` [N] bool: whether a_i is in S. `advantages` [N]: A_i.

    The first two terms alone, which match tokens by their text, are biased: that the student emits
    u and that the teacher emits v(u) are different events. With one tokenizer and A_i the cost of
    one token, J_i is `topk_kl` with the tail `bucket+sampled`.
    """
    matched = topk_kl(student, teacher, token_in_head, direction="reverse", tail="bucket")
    log_p = student.token_logprobs.clamp(min=LOWEST_LOGPROB)
    of_tail = student.tail_logmass.clamp(min=LOWEST_LOGPROB)
    of_tail = of_tail - teacher.tail_logmass.clamp(min=LOWEST_LOGPROB)
    of_token = log_p - teacher.token_logprobs.clamp(min=LOWEST_LOGPROB)
    known = torch.where(token_in_head, of_token, of_tail).detach()
    return matched + (log_p - log_p.detach()).exp() * (advantages.detach() - known)
