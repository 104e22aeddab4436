"""Losses between a student and a teacher with another tokenizer.

An answer has the student tokens a. Its bytes are x = d(a), where d decodes tokens. The teacher's
encoding of these bytes is b = t(x). All include the token that ends the answer. The cost of the
answer is L(a) = log p(a) - log q(b). Let Q(x) be the teacher's probability of the bytes in any
encoding, and kappa(x) = q(t(x)) / Q(x). Then

    E[L] = KL(P||Q) - H(A|X) + E[-log kappa(X)]

The entropy H(A|X) rewards different encodings of the same bytes: the minimum is p(a) ~ q(t(d(a))).
Two ways make non-canonical encodings less likely. The first is used:

- A constant c in the cost of each non-canonical encoding. At the minimum, the odds of these
  encodings are e^-c.
- Weight 0 for these encodings. The gradient would be that of the generalised KL, the sum over
  canonical a of p log(p/q) - p + q. Its minimum is p = q. But this KL is at most 1 nat if no answer
  is canonical, so a student with a larger KL would learn non-canonical encodings.

The advantage of a token is the part of the cost that the token can change:

    A_i = sum_{j >= i} log p_j - sum_{j >= sigma_i} log q_j

sigma_i is the number of teacher tokens that are the same for every continuation of the bytes before
token i. The gradient with this advantage is an unbiased estimate of the gradient of E[L]. Without
the tokens between sigma_i and i, it is biased, because a later student token may decide whether an
earlier token boundary of the teacher exists. For the same reason, two simpler choices are biased:
the cost of the chunk of token i, with or without the later chunks, and an equal division of a
chunk's log q among its student tokens.

Here sigma_i counts the tokens before the last word that began before token i. If token i begins a
word, this is the previous word, which token i ends; otherwise it is the word of token i. With K_w =
log p - log q of all tokens of word w,

    answer  A_i = sum of K_w from that word to the end of the answer
    word    A_i = sum of K_w from that word to the word of token i

The terms log p of K_w before token i do not change the mean. The second form ignores the effect of
a token on later words. The per-token KL with one tokenizer ignores it too. This form has less
variance.

In a store, the answers are sampled from the teacher: tokens b, bytes x. The student's encoding is a
= s(x). The gradient of the mean of -log p(a) is that of the forward KL, and needs no log q.
`mapped_kl` has the same mean gradient and less variance. It reads the teacher's rows where words
begin, and maps their head ids to the first tokens of the student's encodings of these ids.
`chunk_divergence` compares the likelihoods of token runs, as ALM does (arXiv 2503.20083).

`tests/student_trainer/cross_tokenizer/test_losses.py` verifies these statements by enumeration, and
`test_stored_losses.py` the last paragraph. A chunk is a shortest run of student tokens with the
bytes of a run of teacher tokens; `clients/cross_tokenizer/alignment.py` also defines words.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from student_trainer.losses.advantages import gae
from student_trainer.losses.rows import LOWEST_LOGPROB, Rows

# Where the sum of costs in a token's advantage ends: at the end of its word or of the answer.
Horizon = Literal["word", "answer"]
# The runs of tokens whose likelihoods `chunk_divergence` compares.
Unit = Literal["chunk", "word"]
# ALM's temperature.
UNIT_TEMPERATURE = 100.0
# The lowest -log of a likelihood: below it, float32 does not distinguish a probability from 1.
_MIN_NEG_LOG = 1e-6


def cross_tokenizer_kl(
    student_logprobs: Tensor,
    teacher_shares: Tensor,
    word: Tensor,
    answer: Tensor,
    learned: Tensor,
    *,
    horizon: Horizon,
    importance: Tensor | None = None,
) -> Tensor:
    """Return the cost of each token, [N] in nats, with the gradient A_i grad log p_i.

    - student_logprobs [N]: log-probs of the sampled tokens. The gradient flows through them.
    - teacher_shares [N]: log q of the words, divided among their tokens in any way.
    - word [N] int64, below N: the number of the word of each token; words of different answers have
      different numbers.
    - answer [N] int64, below N: the number of the answer of each token.
    - learned [N] bool: tokens that are not learned have neither cost nor gradient.
    - importance [N]: the detached p/mu if another policy mu sampled the tokens. It multiplies the
      gradient. None means 1.

    All tokens of a word and of an answer must be in the call, adjacent and in order. The costs of a
    word sum to K_w. The mean of the costs is not a per-token KL.
    """
    log_p = student_logprobs.clamp(min=LOWEST_LOGPROB)
    zeros = torch.zeros_like(log_p.detach())
    costs = torch.where(learned, (log_p - teacher_shares).detach(), zeros)
    gradient = word_advantages(costs, word, answer, horizon) * (log_p - log_p.detach())
    if importance is not None:
        gradient = importance.detach() * gradient
    return costs + torch.where(learned, gradient, zeros)


def word_advantages(costs: Tensor, word: Tensor, answer: Tensor, horizon: Horizon) -> Tensor:
    """Return the advantage A_i of each token, [N].

    `costs` [N]: log p of each token minus its teacher share. The other arguments are described in
    `cross_tokenizer_kl`.
    """
    word_costs = torch.zeros_like(costs).index_add(0, word, costs)
    advantages = word_costs[word] + costs_before(costs, word, answer)
    if horizon == "answer":
        advantages += costs_to_come(costs, answer) - costs_to_come(costs, word)
    return advantages


def costs_before(costs: Tensor, word: Tensor, answer: Tensor) -> Tensor:
    """Return for each token that begins a word the cost of the previous word of its answer, [N].

    The value is 0 for other tokens.
    """
    word_costs = torch.zeros_like(costs).index_add(0, word, costs)
    begins_word = (word[1:] != word[:-1]) & (answer[1:] == answer[:-1])
    previous_costs = torch.zeros_like(costs)
    previous_costs[1:] = torch.where(begins_word, word_costs[word[:-1]], previous_costs[1:])
    return previous_costs


def costs_to_come(costs: Tensor, segment: Tensor) -> Tensor:
    """Return the sum of the costs from each token to the end of its segment, [N]; no gradient.

    `segment` [N] int64: the number of the segment of each token. The tokens of a segment are
    adjacent.
    """
    return gae(costs, torch.zeros_like(costs), segment, gamma=1.0, lam=1.0)[0]


def mapped_kl(student: Rows, teacher_shares: Tensor, weights: Tensor, learned: Tensor) -> Tensor:
    """Return the loss of each token, [N] in nats, for answers that the teacher wrote.

    Let token i begin a word, at the teacher token b_t. The row of b_t has the head ids v with the
    probabilities q. C are the head ids that also begin a word, and m(v) is the first token of the
    student's encoding of the bytes of v. If b_t is in C, the loss of token i is

        share_i - log p(a_i) - sum_{v in C} w_v log p(m(v)),    w_v = q(v) / q(C) - 1[v = b_t]

    Otherwise, and for tokens within words, the loss is share_i - log p(a_i).

    The sum is a control variate: its mean over b_t in C is 0 for any m, because a new word changes
    no earlier token. So the mean gradient is that of -log p(a_i), with any head. Where m(b_t) =
    a_i, as at nearly all words, the gradient is that of a cross-entropy over C. Within a word the
    mean would not be 0, because b_t decides whether both encodings have a common boundary.

    - student: N rows; `sample_logprobs` [N, M] are the log-probs of the ids m(v), which may be
      repeated.
    - teacher_shares [N]: log q of the answers, and w_v log q(v), divided among the tokens in any
      way; no gradient.
    - weights [N, M]: w_v.
    - learned [N] bool: tokens that are not learned have no loss.
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

    Let p and q be the student's and the teacher's probability of a run given the preceding text,
    and t the `temperature`. The divergence is ALM's binarised KL (arXiv 2503.20083, section 3),
    times t:

        t (a log(a/b) + (1 - a) log((1 - a)/(1 - b))),    a = q^(1/t), b = p^(1/t)

    It is 0 only at p = q. For large t it tends to l_p - l_q - l_q log(l_p/l_q), with l = -log. Its
    gradient tends to the gradient of the cross-entropy times 1 - l_q/l_p. So the likelihood of a
    run does not rise if teacher and student agree on it.

    - student_logprobs [N]: the gradient flows through them.
    - teacher_shares [N]: log q of the runs, divided among their tokens in any way.
    - unit [N] int64, below N: the number of the run of each token; runs of different answers have
      different numbers. The tokens of a run are adjacent and all in the call.
    - learned [N] bool: equal for all tokens of a run. Runs that are not learned have neither
      divergence nor gradient.
    """
    zeros = torch.zeros_like(student_logprobs)
    log_p, log_q = (
        zeros.index_add(0, unit, torch.where(learned, logprobs.clamp(min=LOWEST_LOGPROB), zeros))
        for logprobs in (student_logprobs, teacher_shares)
    )
    log_b, log_a = (logprobs.clamp(max=-_MIN_NEG_LOG) / temperature for logprobs in (log_p, log_q))
    a, complement_a = log_a.exp(), -log_a.expm1()
    unit_divergences = a * (log_a - log_b) + complement_a * (
        complement_a.log() - (-log_b.expm1()).log()
    )
    is_first = torch.ones_like(learned)
    is_first[1:] = unit[1:] != unit[:-1]
    return temperature * torch.where(is_first & learned, unit_divergences[unit], zeros)
