"""Top-k KL: exact over the head, with a correction for the tail.

p is the student, q the teacher and y the sampled token. The head S is a set of k ids:

- reverse, KL(p||q): the top-k of the sampling policy.
- forward, KL(q||p): the top-k of the teacher.

S neither depends on y nor carries a gradient. The sum over S is exact. `tail` selects the term for
the ids outside S. The table has these symbols:

- P_t, Q_t: the tail masses of student and teacher.
- m = 1[y not in S], r = p(y)/sg(p(y)), w = q(y)/p(y).
- s: the importance weight.
- sg: stop-gradient.
- R, v_i: defined below the table.

    tail             added to the head: reverse | forward                 unbiased
    none             0: the truncated KL; not a KL, can be negative       no
    published        s m r sg(-log w)   | s m (sg(w) log w + log r)       value
    sampled          s m r (-log w)     | s m sg(w) log w                 value and gradient
    bucket           P_t log(P_t/Q_t)   | Q_t log(Q_t/P_t)                a lower bound
    bucket+sampled   bucket + s m R                                       value and gradient
    bucket+draws     bucket + sum_i v_i R(z_i), z_i drawn by the student   value and gradient
    bucket+teacher_samples          | bucket + (Q_t/M) sum_i [log q~(y_i) - log p~(y_i)]
                     forward only, y_i drawn by the teacher from its tail  value and gradient

`published` is Algorithms 1 and 2 of EMA-PG (arXiv 2602.04417). This mode exists to reproduce the
paper. Its gradient is that of the KL plus grad P_S (reverse) or minus grad P_S (forward), where P_S
is the student's head mass. The cause is a term that K4 and K5 omit: it sums to zero over the full
vocabulary but not over the tail.

`bucket+sampled` omits the same term within the tail distributions p~ = p/P_t and q~ = q/Q_t, where
it sums to zero:

    reverse  R = r sg(log p~(y) - log q~(y))
    forward  R = sg(w (log q~(y) - log p~(y))) - sg(w - Q_t/P_t) (log p~(y) - sg(log p~(y)))

Q_t/P_t is a control variate: the mean of its term is zero.

`bucket+draws` has the same R at M ids z_i outside S, so this sum does not depend on whether y is in
S. Let M g(z) be the expected number of times that z is drawn. Then v_i = sg(p(z_i) / (M g(z_i))).
The expectation of the sum is the sum over the tail of p(z) R(z), with independent or stratified
draws, for any g with g(z) > 0 on the tail. If the student draws from its own tail, g = p~ and v_i =
sg(P_t)/M. If another policy mu drew from its own tail, g = mu/mu_t, where mu_t is its tail mass.
docs/methods.md has the derivation.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

import torch
from torch import Tensor

from student_trainer.losses.rows import HIGHEST_LOG_RATIO, LOWEST_LOGPROB, Rows, index_equal_ids

Direction = Literal["reverse", "forward"]
Tail = Literal[
    "none",
    "published",
    "sampled",
    "bucket",
    "bucket+sampled",
    "bucket+draws",
    "bucket+teacher_samples",
]


def topk_kl(
    student: Rows,
    teacher: Rows,
    token_in_head: Tensor,
    *,
    direction: Direction,
    tail: Tail,
    importance: Tensor | None = None,
    draw_logprobs: Tensor | None = None,
) -> Tensor:
    """Return the Top-k KL of each token, [N] in nats; the gradient flows through `student` only.

    - student, teacher: N rows at the same head ids.
    - token_in_head [N] bool: whether the sampled token y is one of the head ids.
    - tail: see the table in the module docstring.
    - importance [N]: the detached p(y)/mu(y) if another policy mu sampled y. It multiplies the
      sampled part. None means 1.
    - draw_logprobs [N, M]: only for `bucket+draws`, log g(z_i), the log-prob in nats with which
      each id was drawn. +inf: the id is ignored. None: the current student drew all ids from its
      tail; rows without a tail are then ignored.

    `bucket+draws` and `bucket+teacher_samples` read `sample_logprobs` of student and teacher, and
    ignore `token_in_head` and `importance`.

    Raises ValueError if rows lack the samples of their tail mode, or if the direction of
    `bucket+teacher_samples` is "reverse".
    """
    p = _clamp_rows(student)
    q = _clamp_rows(teacher.detach())
    head = _kl_terms(p.head_logprobs, q.head_logprobs, direction).sum(1)
    if tail == "none":
        return head
    if tail.startswith("bucket"):
        head = head + _kl_terms(p.tail_logmass, q.tail_logmass, direction)
    if tail == "bucket":
        return head
    if tail == "bucket+draws":
        return head + _estimate_by_draws(p, q, draw_logprobs, direction)
    if tail == "bucket+teacher_samples":
        return head + _estimate_by_teacher_samples(p, q, direction)
    # Replace the inputs of tokens in the head, instead of multiplying by zero: 0 * inf is NaN.
    is_outside = ~token_in_head
    log_p, log_q, log_p_tail, log_q_tail = (
        torch.where(is_outside, values, torch.zeros_like(values))
        for values in (p.token_logprobs, q.token_logprobs, p.tail_logmass, q.tail_logmass)
    )
    match tail:
        case "published":
            sampled_term = _estimate_published(log_p, log_q, direction)
        case "sampled":
            sampled_term = _estimate_sampled(log_p, log_q, direction)
        case "bucket+sampled":
            sampled_term = _estimate_within_tail(
                log_p, log_q, log_p_tail, log_q_tail, torch.zeros_like(log_p), direction
            )
        case _:
            assert_never(tail)
    sampled_term = torch.where(is_outside, sampled_term, torch.zeros_like(sampled_term))
    return head + (sampled_term if importance is None else importance.detach() * sampled_term)


def _clamp_rows(rows: Rows) -> Rows:
    return rows.map(lambda values: values.clamp(min=LOWEST_LOGPROB))


def _kl_terms(log_p: Tensor, log_q: Tensor, direction: Direction) -> Tensor:
    """Return the term of each outcome in the sum of the KL."""
    if direction == "reverse":
        return log_p.exp() * (log_p - log_q)
    return log_q.exp() * (log_q - log_p)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().clamp(max=HIGHEST_LOG_RATIO).exp()


def _estimate_published(log_p: Tensor, log_q: Tensor, direction: Direction) -> Tensor:
    log_w, log_r = log_q - log_p, log_p - log_p.detach()
    if direction == "reverse":
        return log_r.exp() * -log_w.detach()
    return _bounded_exp(log_w) * log_w + log_r


def _estimate_sampled(log_p: Tensor, log_q: Tensor, direction: Direction) -> Tensor:
    log_w, log_r = log_q - log_p, log_p - log_p.detach()
    if direction == "reverse":
        return log_r.exp() * -log_w
    return _bounded_exp(log_w) * log_w


def _estimate_by_teacher_samples(p: Rows, q: Rows, direction: Direction) -> Tensor:
    """Estimate the KL within the tail, Q_t KL(q~||p~), as a mean over the teacher's samples."""
    if direction != "forward" or p.sample_logprobs is None or q.sample_logprobs is None:
        raise ValueError(
            "bucket+teacher_samples needs forward KL and rows with tail samples; use tail='bucket'"
        )
    log_q_within = q.sample_logprobs.mean(1) - q.tail_logmass
    log_p_within = p.sample_logprobs.mean(1) - p.tail_logmass
    # The values for an empty tail are placeholders; its mass of zero removes them.
    return q.tail_logmass.exp() * (log_q_within - log_p_within)


def _estimate_by_draws(
    p: Rows, q: Rows, draw_logprobs: Tensor | None, direction: Direction
) -> Tensor:
    """Estimate the KL within the tail from ids that the student drew: sum_i v_i R(z_i)."""
    log_p, log_q = p.sample_logprobs, q.sample_logprobs
    if log_p is None or log_q is None or log_p.shape != log_q.shape or not log_p.shape[1]:
        raise ValueError(
            "bucket+draws needs rows of student and teacher with the log-prob of each draw; "
            "use tail='bucket+sampled'"
        )
    log_p_tail, log_q_tail = p.tail_logmass[:, None], q.tail_logmass[:, None]
    if draw_logprobs is None:
        draw_logprobs = torch.where(log_p_tail > LOWEST_LOGPROB, log_p - log_p_tail, torch.inf)
    log_v = log_p - draw_logprobs - math.log(log_p.shape[1])
    return _estimate_within_tail(log_p, log_q, log_p_tail, log_q_tail, log_v, direction).sum(1)


def _estimate_within_tail(
    log_p: Tensor,
    log_q: Tensor,
    log_p_tail: Tensor,
    log_q_tail: Tensor,
    log_v: Tensor,
    direction: Direction,
) -> Tensor:
    """Return R of each sample, multiplied by the detached exp(log_v).

    The module docstring defines R.
    """
    gap = ((log_p - log_p_tail) - (log_q - log_q_tail)).detach()
    if direction == "reverse":
        return _bounded_exp(log_v) * (log_p - log_p.detach()).exp() * gap
    # Use one exponential for v w: the product of two large exponentials could overflow.
    w = _bounded_exp(log_v + log_q - log_p)
    log_p_within = log_p - log_p_tail
    control = w - _bounded_exp(log_v + log_q_tail - log_p_tail)
    return -w * gap - control * (log_p_within - log_p_within.detach())


def exact_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    direction: Direction,
    temperature: float = 1.0,
) -> Tensor:
    """Return KL(student || teacher) ("reverse") or KL(teacher || student) ("forward"), [N] in nats.

    The KL covers the whole vocabulary. It is the reference for all other losses: Top-k KL with K =
    V is equal to it in every tail mode.

    Both logits [N, V] are divided by `temperature`. Log-probs below LOWEST_LOGPROB are raised to
    it. The gradient flows through the student only.
    """
    log_p = _log_softmax(student_logits, temperature)
    log_q = _log_softmax(teacher_logits, temperature).detach()
    if direction == "reverse":
        return (log_p.exp() * (log_p - log_q)).sum(1)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    return scaled.log_softmax(1).clamp(min=LOWEST_LOGPROB)


@torch.no_grad()
def draw_noise(
    student: Rows, teacher: Rows, draw_ids: Tensor, draw_logprobs: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the variance of the gradient of each token and the squared norm of its mean, both [N].

    This function is for reverse KL with tail mode `bucket+draws`. In the logits, the part of a
    token's gradient that depends on the draws z_1..z_M is

        (1/M) sum_i s_i (e_(z_i) - p),    s_i = p(z_i)/g(z_i) gap(z_i).

    e_z is the unit vector of id z. g is the distribution of the draws (see `topk_kl`), and gap is
    the log-ratio of student and teacher within the tail. The sample variance of the terms estimates
    the variance of the gradient from the rows alone, without any [N, V] tensor.

    - student, teacher: N rows with M >= 2 draws.
    - draw_ids [N, M] int64: the ids of the draws.
    - draw_logprobs [N, M]: see `topk_kl`.
    - kl [N]: KL(student||teacher) in nats, as `topk_kl` estimates it.

    The variance is unbiased for independent draws; stratified draws usually have less. The squared
    norm is exact except for the tail's share and `kl`, which are estimates.
    """
    p, q = (rows.map(lambda x: x.clamp(min=LOWEST_LOGPROB)) for rows in (student, teacher))
    assert p.sample_logprobs is not None, "rows have draws"
    assert q.sample_logprobs is not None, "rows have draws"
    log_p, log_ratio = p.sample_logprobs, p.sample_logprobs - q.sample_logprobs
    count = log_p.shape[1]
    ratio = (log_p - draw_logprobs).clamp(max=HIGHEST_LOG_RATIO).exp()  # 0 for placeholders
    draw_probs = log_p.exp()
    head_probs = p.head_logprobs.exp()
    scale = ratio * (log_ratio - (p.tail_logmass - q.tail_logmass)[:, None])
    squared_prob_sum = head_probs.square().sum(1) + (ratio * draw_probs).mean(1)  # sum of p^2
    # Equal ids share one entry of the vector.
    summed_scale = torch.zeros_like(scale).scatter_add_(1, index_equal_ids(draw_ids), scale)
    total = scale.sum(1)
    diagonal_terms = (scale.square() * (1 - 2 * draw_probs + squared_prob_sum[:, None])).sum(1)
    cross_terms = (
        summed_scale.square().sum(1)
        - 2 * total * (scale * draw_probs).sum(1)
        + squared_prob_sum * total.square()
    )
    variance = (diagonal_terms - cross_terms / count).clamp(min=0) / (count * (count - 1))
    head_ratio = p.head_logprobs - q.head_logprobs - kl[:, None]
    squared_norm = (head_probs * head_ratio).square().sum(1)
    squared_norm = squared_norm + (ratio * draw_probs * (log_ratio - kl[:, None]).square()).mean(1)
    return variance, squared_norm
