"""Losses between a student and a teacher of another tokenizer.

An answer has the student tokens a, the bytes x = d(a), and the teacher's encoding b = t(x) of these
bytes, all with the token that ends the answer. Its cost is L(a) = log p(a) - log q(b). With
kappa(x) = q(t(x)) / Q(x), where Q(x) is the probability of the bytes in any of their encodings,

    E[L] = KL(P||Q) - H(A|X) + E[-log kappa(X)]

The entropy H(A|X) rewards spelling the same bytes in many ways. Cost 0 for answers that are not the
student's canonical encoding of their bytes, the set C, removes it: the gradient is then that of

    sum over a in C of p(a) log(p(a)/q(b)) - p(a) + q(b),

the generalised KL, which is 0 where p = q on C, and then p has no other spellings.

A token's advantage is the part of the cost that the token can change. Two forms, in which a segment
is the answer or the chunk:

    answer  A_i = sum_{j >= i} log p_j - sum_{j >= sigma_i} log q_j
    chunk   A_i = sum_{j >= i, same chunk} log p_j - log q(teacher tokens of the chunk)

sigma_i is the number of teacher tokens that are the same for every continuation of the bytes before
token i. The first form is unbiased for the gradient of E[L]. It is not without the tokens between
sigma_i and i: a later student token may decide whether an earlier boundary of the teacher exists.
So the sum over the chunks from that of token i on is biased, and so is an equal division of a
chunk's log q among its student tokens. The second form ignores, like the KL of tokens with one
tokenizer, that a token changes what comes after its chunk.

Both are sums from token i to the end of its segment, if each token has a share of the teacher's
log-probs: in the first log q of the tokens from sigma_i up to sigma_{i+1}, in the second log q of
the chunk at its last token. A segment with another spelling has the cost 0 in all, so what is to
come is minus what was: A_i is minus the sum before token i. Leaving such segments out instead is
biased, because later tokens decide whether a spelling is canonical.

`tests/student_trainer/losses/test_cross_tokenizer.py` enumerates all of this. A chunk is a shortest
run of student tokens with the bytes of a run of teacher tokens: `clients/alignment/alignment.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from student_trainer.losses.advantages import gae
from student_trainer.losses.rows import LOWEST_LOGPROB, Rows
from student_trainer.losses.topk import topk_kl


def cross_tokenizer_kl(
    student_logprobs: Tensor,
    teacher_shares: Tensor,
    segment: Tensor,
    canonical: Tensor,
    *,
    importance: Tensor | None = None,
) -> Tensor:
    """Return the cost of each token, [N] in nats, with the gradient A_i grad log p_i.

    `student_logprobs` [N]: of the sampled tokens; the gradient flows through them. `teacher_shares`
    [N]: the share of each token in the teacher's log-probs. `segment` [N] int64: the segment of
    each token; the tokens of a segment are adjacent, in order, and all in the call. `canonical` [N]
    bool: of the token's segment; a segment with another spelling has the cost 0. `importance` [N]:
    the detached p/mu if another policy mu sampled the tokens; it multiplies the gradient. None: 1.

    The costs of a segment have the sum log p - log q. Their mean is no KL of a single token.
    """
    log_p = student_logprobs.clamp(min=LOWEST_LOGPROB)
    costs = (log_p - teacher_shares).detach()
    advantages = segment_advantages(costs, segment, canonical)
    weights = advantages if importance is None else importance.detach() * advantages
    value = torch.where(canonical, costs, torch.zeros_like(costs))
    return value + weights * (log_p - log_p.detach())


def segment_advantages(costs: Tensor, segment: Tensor, canonical: Tensor) -> Tensor:
    """Return A_i of each token, [N]: the costs to come in its segment; see the module docstring.

    `costs` [N]: log p minus the teacher's share. `segment`, `canonical`: as above. No gradient.
    """
    none = torch.zeros_like(costs)
    to_come = gae(costs, none, segment, gamma=1.0, lam=1.0)[0]
    before = none.index_add(0, segment, costs)[segment] - to_come
    return torch.where(canonical, to_come, -before)


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
