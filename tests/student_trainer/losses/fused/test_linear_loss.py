"""The fused operator compared with autograd on materialised logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from student_trainer.losses import (
    Rows,
    clipped_surrogate,
    entropy_from_logits,
    fused_linear_loss,
    fused_linear_rows,
    importance_weights,
    kl_reward,
    rows_from_logits,
    sampled_kl,
    sequence_log_ratio,
    token_log_ratio,
    topk_kl,
)

TAILS = ["none", "published", "sampled", "bucket", "bucket+sampled"]


def problem(n, vocab, k, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    # Logits of standard deviation 1.5: enough to matter, far from ratios beyond float32.
    hidden, weight = randn(n, 8).requires_grad_(), (0.4 * randn(vocab, 8)).requires_grad_()
    bias = (0.5 * randn(vocab)).requires_grad_()
    teacher_logits = 1.5 * randn(n, vocab)
    head = teacher_logits.topk(k).indices
    tokens = torch.randint(vocab, (n,), generator=generator)
    weights = (torch.rand(n, generator=generator) > 0.2).to(dtype)
    teacher = rows_from_logits(teacher_logits, head, tokens, sample_ids=samples_of(head, vocab))
    return hidden, weight, bias, head, tokens, teacher, weights


def samples_of(head, vocab, count=3):
    """Return ids outside the head, some of them repeated; any ids, where the head has all."""
    is_outside = torch.ones(len(head), vocab).scatter_(1, head, 0)
    is_outside[is_outside.sum(1) == 0] = 1
    generator = torch.Generator().manual_seed(1)
    return is_outside.multinomial(count, replacement=True, generator=generator)


def make_loss(name, head, tokens, teacher: Rows, weights):
    is_in_head = (head == tokens[:, None]).any(1)
    old_logprobs = teacher.token_logprobs

    options = {"dtype": old_logprobs.dtype, "device": old_logprobs.device}
    advantages = torch.linspace(-1, 1, len(old_logprobs), **options)
    # Log-probs of the draws by some policy; the first draw of every row is ignored.
    draw_logprobs = torch.linspace(-6, -1, teacher.sample_logprobs.numel(), **options)
    draw_logprobs = draw_logprobs.view_as(teacher.sample_logprobs).clone()
    draw_logprobs[:, 0] = torch.inf

    def surrogate(rows: Rows, index, added_advantage=0.0):
        log_ratio = token_log_ratio(rows.token_logprobs, old_logprobs[index])
        return clipped_surrogate(
            log_ratio, advantages[index] + added_advantage, clip_low=0.2, clip_high=0.28
        )

    def loss(rows: Rows, index):
        match name.split("/"):
            case ["grpo"]:
                values = surrogate(rows, index)
            case ["grpo+kl", direction]:
                importance = importance_weights(
                    rows.token_logprobs, old_logprobs[index], clip=(0.5, 2.0)
                )
                kl = topk_kl(
                    rows,
                    teacher[index],
                    is_in_head[index],
                    direction=direction,
                    tail="bucket+sampled",
                    importance=importance,
                )
                values = surrogate(rows, index) + 0.1 * kl
            case ["grpo+kl-as-reward"]:
                values = surrogate(rows, index, 0.1 * kl_reward(rows, teacher[index]))
            case ["cross-entropy"]:
                values = -rows.token_logprobs
            case ["sampled", kind]:
                values = sampled_kl(rows.token_logprobs, old_logprobs[index], kind)
            case [direction, "bucket+draws", "importance"]:
                values = topk_kl(
                    rows,
                    teacher[index],
                    is_in_head[index],
                    direction=direction,
                    tail="bucket+draws",
                    draw_logprobs=draw_logprobs[index],
                )
            case [direction, tail]:
                values = topk_kl(
                    rows, teacher[index], is_in_head[index], direction=direction, tail=tail
                )
        return values * weights[index]

    return loss


LOSSES = [
    *[f"{direction}/{tail}" for direction in ("reverse", "forward") for tail in TAILS],
    "forward/bucket+teacher_samples",
    *[f"{direction}/bucket+draws" for direction in ("reverse", "forward")],
    *[f"{direction}/bucket+draws/importance" for direction in ("reverse", "forward")],
    *[f"sampled/{kind}" for kind in ("k1", "k2", "k3", "k3++", "k4", "k5")],
    "grpo",
    "grpo+kl/reverse",
    "grpo+kl/forward",
    "grpo+kl-as-reward",
    "cross-entropy",
]


def compare(
    name,
    n,
    vocab,
    k,
    *,
    seed=0,
    temperature=1.0,
    chunk_rows=7,
    with_bias=True,
    dtype=torch.float32,
    tolerance=1e-6,
):
    hidden, weight, bias, head, tokens, teacher, weights = problem(n, vocab, k, seed, dtype)
    loss_fn = make_loss(name, head, tokens, teacher, weights)
    leaves = [hidden, weight, *([bias] if with_bias else [])]

    # The reference is in float64: of two float32 results, each could be half the bound away.
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = exact_leaves[0] @ exact_leaves[1].T + (exact_leaves[2] if with_bias else 0)
    samples = samples_of(head, vocab) if "teacher_samples" in name or "draws" in name else None
    rows = rows_from_logits(logits, head, tokens, sample_ids=samples, temperature=temperature)
    exact_teacher = teacher.map(torch.Tensor.double)
    reference = make_loss(name, head, tokens, exact_teacher, weights.double())
    exact_loss = reference(rows, slice(0, n)).sum()
    expected = torch.autograd.grad(exact_loss * 3, exact_leaves)

    fused = fused_linear_loss(
        hidden,
        weight,
        head,
        tokens,
        loss_fn,
        sample_ids=samples,
        bias=bias if with_bias else None,
        temperature=temperature,
        chunk_rows=chunk_rows,
    )
    gradients = torch.autograd.grad(fused.loss_sum * 3, leaves)
    scale = max(1.0, float(exact_loss.detach().abs()))
    assert abs(fused.loss_sum - exact_loss).detach() <= tolerance * scale * 10
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() <= tolerance * max(float(b.norm()), 1.0)
    for field, values in vars(rows).items():
        if values is None:
            continue
        fused_values = getattr(fused.rows, field).double()
        torch.testing.assert_close(fused_values, values.detach(), rtol=1e-5, atol=1e-5)
    entropy = entropy_from_logits(logits, temperature=temperature)
    torch.testing.assert_close(fused.metrics["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)
    assert fused.metrics["loss"].sum() == fused.loss_sum.detach()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_autograd(name):
    compare(name, n=64, vocab=200, k=16)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_autograd_in_float64(name):
    compare(name, n=20, vocab=50, k=6, dtype=torch.float64, tolerance=1e-13)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(LOSSES),
    n=st.integers(1, 12),
    vocab=st.integers(2, 40),
    data=st.data(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk_rows=st.integers(1, 13),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(name, n, vocab, data, temperature, chunk_rows, with_bias, seed):
    k = data.draw(st.integers(1, vocab))
    compare(
        name,
        n,
        vocab,
        k,
        seed=seed,
        temperature=temperature,
        chunk_rows=chunk_rows,
        with_bias=with_bias,
        dtype=torch.float64,
        tolerance=1e-10,
    )


def test_the_losses_stay_on_the_device_of_their_rows():
    """A GPU refuses operations on two devices; so does the meta device."""
    *_, head, tokens, teacher, weights = (
        value.map(lambda tensor: tensor.to("meta")) if isinstance(value, Rows) else value.to("meta")
        for value in problem(6, 20, 3)
    )
    for name in LOSSES:
        values = make_loss(name, head, tokens, teacher, weights)(teacher, slice(0, 6))
        assert (values.device.type, values.shape) == ("meta", (6,)), name


def test_frozen_head_or_body_costs_no_gradient():
    hidden, weight, _, head, tokens, teacher, weights = problem(10, 30, 4)
    loss_fn = make_loss("reverse/bucket", head, tokens, teacher, weights)
    gradients = torch.autograd.grad(
        fused_linear_loss(hidden, weight, head, tokens, loss_fn).loss_sum, [hidden, weight]
    )
    body_loss = fused_linear_loss(hidden, weight.detach(), head, tokens, loss_fn).loss_sum
    is_computed = [grad is not None for grad in body_loss.grad_fn.gradients.scale_by(None)]
    assert is_computed == [True, False, False]
    torch.testing.assert_close(torch.autograd.grad(body_loss, hidden)[0], gradients[0])
    head_loss = fused_linear_loss(hidden.detach(), weight, head, tokens, loss_fn).loss_sum
    is_computed = [grad is not None for grad in head_loss.grad_fn.gradients.scale_by(None)]
    assert is_computed == [False, True, False]
    torch.testing.assert_close(torch.autograd.grad(head_loss, weight)[0], gradients[1])


def sequence_loss(rows: Rows, old_logprobs):
    """Return GSPO's loss plus two artificial losses of all rows."""
    sequence = torch.arange(4).repeat_interleave(len(old_logprobs) // 4)
    log_ratio = sequence_log_ratio(rows.token_logprobs, old_logprobs, sequence)
    advantages = torch.linspace(-1, 1, 4, dtype=old_logprobs.dtype)[sequence]
    policy_loss = clipped_surrogate(log_ratio, advantages, clip_low=0.2, clip_high=0.28).sum()
    return policy_loss + rows.tail_logmass.var() + rows.sample_logprobs.var()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 4),
    vocab=st.integers(2, 40),
    data=st.data(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk_rows=st.integers(1, 13),
    with_bias=st.booleans(),
)
def test_losses_of_all_rows_at_once(length, vocab, data, temperature, chunk_rows, with_bias):
    """A loss of the whole batch: logits are computed twice, and the gradient is exact."""
    k = data.draw(st.integers(0, vocab - 1))
    hidden, weight, bias, head, tokens, teacher, _ = problem(
        4 * length, vocab, k, dtype=torch.float64
    )
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    old_logprobs = teacher.token_logprobs
    logits = hidden @ weight.T + (bias if with_bias else 0)
    samples = samples_of(head, vocab)
    plain_rows = rows_from_logits(logits, head, tokens, sample_ids=samples, temperature=temperature)
    expected = torch.autograd.grad(sequence_loss(plain_rows, old_logprobs), leaves)
    rows, entropy = fused_linear_rows(
        hidden,
        weight,
        head,
        tokens,
        sample_ids=samples,
        bias=bias if with_bias else None,
        temperature=temperature,
        chunk_rows=chunk_rows,
    )
    for gradient, expected_gradient in zip(
        torch.autograd.grad(sequence_loss(rows, old_logprobs), leaves), expected, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, entropy_from_logits(logits, temperature=temperature))


def test_nothing_is_differentiated_where_nobody_asks():
    hidden, weight, _, head, tokens, teacher, weights = problem(10, 30, 4)
    with torch.no_grad():
        rows, _ = fused_linear_rows(hidden, weight, head, tokens)
        loss_fn = make_loss("reverse/bucket", head, tokens, teacher, weights)
        fused = fused_linear_loss(hidden, weight, head, tokens, loss_fn)
    assert not rows.token_logprobs.requires_grad
    assert not fused.loss_sum.requires_grad


def test_no_derivative_is_made_where_nobody_asks():
    """The loss is not differentiated either: an evaluation may run in inference mode."""
    hidden, weight, _, head, tokens, teacher, weights = problem(10, 30, 4)
    loss_fn = make_loss("reverse/bucket+sampled", head, tokens, teacher, weights)
    expected = fused_linear_loss(hidden, weight, head, tokens, loss_fn)
    with torch.inference_mode():
        fused = fused_linear_loss(hidden * 1, weight, head, tokens, loss_fn, chunk_rows=3)
    torch.testing.assert_close(fused.loss_sum, expected.loss_sum.detach())


def test_a_second_derivative_is_refused():
    hidden, weight, _, head, tokens, teacher, weights = problem(10, 30, 4)
    loss_fn = make_loss("reverse/bucket", head, tokens, teacher, weights)
    loss = fused_linear_loss(hidden, weight, head, tokens, loss_fn).loss_sum
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert gradient.any()
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, hidden)


def test_autocast_counts_as_for_a_linear_layer():
    """The states of a model under autocast may be float32, as those of its last norm."""
    hidden, weight, bias, head, tokens, teacher, weights = problem(16, 40, 5)
    loss_fn = make_loss("forward/bucket+sampled", head, tokens, teacher, weights)

    def run(states):
        fused = fused_linear_loss(states, weight, head, tokens, loss_fn, bias=bias)
        return fused.loss_sum, torch.autograd.grad(fused.loss_sum, [hidden, weight, bias])

    expected, expected_gradients = run(hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = run(hidden)
        rows, _ = fused_linear_rows(hidden, weight, head, tokens, bias=bias)
    assert torch.equal(loss, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected_gradient)
    logits = torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).float() + bias
    plain_rows = rows_from_logits(logits, head, tokens)
    torch.testing.assert_close(rows.token_logprobs, plain_rows.token_logprobs)


def test_entropy_of_a_masked_vocabulary():
    """A bias of -inf masks tokens, inside and outside the head."""
    hidden, weight, bias, head, tokens, _, _ = problem(10, 30, 4)
    bias = bias.detach().clone()
    bias[[0, 1, int(head[0, 0])]] = -torch.inf
    _, entropy = fused_linear_rows(hidden, weight, head, tokens, bias=bias, chunk_rows=3)
    expected = entropy_from_logits(hidden @ weight.T + bias)
    torch.testing.assert_close(entropy, expected)


def test_no_rows():
    weight = torch.randn(5, 3, requires_grad=True)
    fused = fused_linear_loss(
        torch.zeros(0, 3),
        weight,
        torch.zeros(0, 2, dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        lambda rows, index: rows.tail_logmass,
    )
    fused.loss_sum.backward()
    assert fused.loss_sum == 0
    assert (weight.grad == 0).all()


def test_bf16_input_is_reckoned_in_float32():
    hidden, weight, _, head, tokens, teacher, weights = problem(16, 40, 5)
    loss_fn = make_loss("forward/bucket+sampled", head, tokens, teacher, weights)
    bf16_inputs = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    fused = fused_linear_loss(*bf16_inputs, head, tokens, loss_fn, chunk_rows=5)
    assert fused.rows.head_logprobs.dtype == torch.float32
    gradients = torch.autograd.grad(fused.loss_sum, bf16_inputs)
    float32_inputs = [x.detach().float().requires_grad_() for x in bf16_inputs]
    reference = fused_linear_loss(*float32_inputs, head, tokens, loss_fn).loss_sum
    for a, b in zip(gradients, torch.autograd.grad(reference, float32_inputs), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() / b.norm() < 2e-2
