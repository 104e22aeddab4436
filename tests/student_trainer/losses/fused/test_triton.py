"""The two Triton kernels compared with plain torch: interpreted on CPUs, compiled on GPUs."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from student_trainer.losses import LogitMap, fused_linear_loss, fused_linear_rows
from student_trainer.losses.fused import chunk, softmax_torch
from student_trainer.losses.fused.logit_map import LogitCurve
from tests.student_trainer.losses.fused.test_linear_loss import (
    LOSSES,
    make_loss,
    problem,
    samples_of,
)

pytest.importorskip("triton", reason="triton is not installed")
import triton

from student_trainer.losses.fused import softmax_triton

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def _interpreter_fault() -> str:
    """Return why Triton's interpreter cannot run here; "" if it can, or if kernels are compiled."""
    if not INTERPRETED:
        return ""
    try:
        softmax_triton.tail_statistics(torch.zeros(1, 1), LogitCurve(1.0))
    except triton.runtime.errors.InterpreterError as error:
        # Triton 3.6 with NumPy 2.5.
        if "only 0-dimensional arrays" not in str(error):
            raise
        return f"Triton {triton.__version__} does not interpret kernels with this NumPy"
    return ""


if fault := _interpreter_fault():
    pytest.skip(fault, allow_module_level=True)

CURVES = [LogitCurve(1.0), LogitCurve(0.7), LogitCurve(4.0, 9.0)]


def test_the_mark_gpu_selects_every_test_of_the_kernels(request):
    """`pytest -m gpu` on a machine with a GPU runs the compiled kernels."""
    items = [item for item in request.session.items if item.path == request.path]
    assert items
    assert all(item.get_closest_marker("gpu") for item in items)


@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Less than a block, one block, and several blocks plus a remainder.
@pytest.mark.parametrize("vocab", [1, 5, 4096, 9000])
def test_passes_equal_plain_torch(dtype, curve, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (5 * torch.randn(6, vocab, generator=generator)).to(dtype).to(DEVICE)
    logits[0, : vocab // 2] = -torch.inf  # an empty first block
    logits[1] = -torch.inf  # a head of all ids
    logits[2] = 1e4 * logits[2].sign()
    logits[3, vocab // 2] = 300.0
    expected = softmax_torch.tail_statistics(wide := logits.float().clone(), curve)
    logits_before = logits.clone()
    statistics = softmax_triton.tail_statistics(logits, curve)
    assert torch.equal(logits, logits_before)
    is_empty = expected[1] == 0
    assert is_empty[1]
    for output, expected_output in zip(statistics, expected, strict=True):
        torch.testing.assert_close(
            output[~is_empty], expected_output[~is_empty], rtol=2e-6, atol=1e-5
        )
    assert (statistics[1][is_empty] == 0).all()
    assert (statistics[2][is_empty] == 0).all()
    assert statistics[0].isfinite().all()

    # The slope of a cap, 1 - u^2, has the absolute error of u: 1e-7, relatively more near 0.
    tolerance = 1e-30 if curve.height is None else 1e-6

    def compare(output, rounding):
        torch.testing.assert_close(output.float(), expected_output, rtol=rounding, atol=tolerance)

    scale = torch.linspace(-2, 2, 6, device=DEVICE)
    expected_output = softmax_torch.scaled_exp(wide, expected[0], scale, curve, wide)
    bfloat16_output = torch.empty(6, vocab + 3, dtype=torch.bfloat16, device=DEVICE)[:, 1:-2]
    assert (
        softmax_triton.scaled_exp(logits, statistics[0], scale, curve, bfloat16_output)
        is bfloat16_output
    )
    compare(bfloat16_output, 8e-3)
    assert torch.equal(logits, logits_before)
    output = softmax_triton.scaled_exp(logits, statistics[0], scale, curve, logits)
    assert output is logits
    compare(output, {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype])


@pytest.mark.parametrize("width", [1.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_the_cap_of_the_kernel_is_tanh(width):
    """With full precision near 0 and where it saturates; chunks of one id per row."""
    size = torch.logspace(-6, 3, 120, device=DEVICE)
    products = torch.cat([-size, torch.zeros(1, device=DEVICE), size])[:, None]
    top, _, _ = softmax_triton.tail_statistics(products, LogitCurve(width, 30.0))
    exact = 30 * torch.tanh(products[:, 0].double() / width)
    torch.testing.assert_close(top.double(), exact, rtol=4e-7, atol=1e-12)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU's own test is below")
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(60, 1.5, 3.0)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_operator_with_the_kernels(monkeypatch, name, logit_map):
    """The code path of a GPU with float32 states, except its arithmetic."""
    _, weight, bias, *_ = problem(16, 70, 6, seed=1)
    hidden, _, _, head, tokens, teacher, weights = problem(16, logit_map.vocab_size or 70, 6)
    loss_fn = make_loss(name, head, tokens, teacher, weights)

    samples = samples_of(head, logit_map.vocab_size or 70)

    def gradients(**options):
        fused = fused_linear_loss(
            hidden,
            weight,
            head,
            tokens,
            loss_fn,
            sample_ids=samples,
            bias=bias,
            temperature=1.3,
            logit_map=logit_map,
            **options,
        )
        return fused, torch.autograd.grad(fused.loss_sum, [hidden, weight, bias])

    plain_result, expected = gradients(chunk_rows=5)
    monkeypatch.setattr(chunk, "has_kernels", lambda tensor: True)
    fused, kernel_gradients = gradients(chunk_rows=7)
    torch.testing.assert_close(fused.metrics["entropy"], plain_result.metrics["entropy"])
    for a, b in zip(kernel_gradients, expected, strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()


@pytest.mark.parametrize("size", [0, 4])
def test_certain_tokens_keep_their_gradient_in_half_precision(monkeypatch, size):
    """The gradient p - 1 with p = 0.9999 in bfloat16, where p itself rounds to 1."""
    monkeypatch.setattr(chunk, "has_kernels", lambda tensor: tensor.dtype != torch.float64)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3000, (20,), generator=generator)
    logits = torch.randn(20, 3000, generator=generator)
    logits[torch.arange(20), tokens] = torch.linspace(8, 18, 20)
    logits = logits.bfloat16().to(DEVICE)
    head, tokens = logits.float().topk(size).indices, tokens.to(DEVICE)
    logit_chunk = chunk.make_chunk(logits.float(), head, tokens, None, LogitCurve(1.0))
    row_gradients = dataclasses.replace(
        logit_chunk.rows.map(torch.zeros_like), token_logprobs=torch.full_like(logit_chunk.top, -1)
    )
    gradient = logit_chunk.gradient(row_gradients, torch.bfloat16)
    exact_logits = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact_logits, tokens, reduction="sum").backward()
    for gradient_row, exact_row in zip(gradient.double(), exact_logits.grad, strict=True):
        assert (gradient_row - exact_row).norm() <= 1e-2 * exact_row.norm()


@pytest.mark.parametrize("size", [0, 4])
def test_repeated_draws_keep_their_gradient_in_half_precision(monkeypatch, size):
    """60 of 64 draws are the likeliest id of the tail; others are the token and unlikely ids."""
    monkeypatch.setattr(chunk, "has_kernels", lambda tensor: tensor.dtype != torch.float64)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 3000, generator=generator)
    likely_ids = torch.randint(3000, (20,), generator=generator)
    logits[torch.arange(20), likely_ids] = torch.linspace(8, 18, 20)
    logits = logits.bfloat16().to(DEVICE)
    head = logits.float().topk(size + 1).indices[:, 1:]  # all but the likeliest
    tokens = torch.randint(3000, (20,), generator=generator).to(DEVICE)
    draw_ids = torch.randint(3000, (20, 64), generator=generator).to(DEVICE)
    draw_ids[:, 2:62], draw_ids[:, 62] = likely_ids.to(DEVICE)[:, None], tokens
    logit_chunk = chunk.make_chunk(logits.float(), head, tokens, draw_ids, LogitCurve(1.3))
    weights = torch.linspace(0.5, 1.5, 64).expand(20, -1).to(DEVICE) / 64
    zero = logit_chunk.rows.map(torch.zeros_like)
    gradient = logit_chunk.gradient(
        dataclasses.replace(zero, sample_logprobs=-weights), torch.bfloat16
    )
    exact_logits = logits.double().requires_grad_()
    (-weights * (exact_logits / 1.3).log_softmax(1).gather(1, draw_ids)).sum().backward()
    for gradient_row, exact_row in zip(gradient.double(), exact_logits.grad, strict=True):
        assert (gradient_row - exact_row).norm() <= 3e-3 * exact_row.norm()
        assert ((gradient_row - exact_row).abs() <= 1e-2 * exact_row.abs() + 1e-9).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(9000, 1.5, 3.0)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(name, dtype, logit_map):
    """Compiled kernels and cuBLAS, compared with float64 on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False  # a trainer in this process may have allowed it
    hidden, weight, bias, head, tokens, teacher, weights = problem(64, 9000, 16)
    narrow_inputs = [x.detach().to(dtype) for x in (hidden, weight, bias)]
    loss_fn = make_loss(
        name, head.cuda(), tokens.cuda(), teacher.map(torch.Tensor.cuda), weights.cuda()
    )
    inputs = [x.cuda().requires_grad_() for x in narrow_inputs]
    samples = samples_of(head, 9000)
    fused = fused_linear_loss(
        *inputs[:2],
        head.cuda(),
        tokens.cuda(),
        loss_fn,
        sample_ids=samples.cuda(),
        bias=inputs[2],
        logit_map=logit_map,
        chunk_rows=13,
    )
    gradients = torch.autograd.grad(fused.loss_sum, inputs)
    exact_inputs = [x.double().requires_grad_() for x in narrow_inputs]
    reference = make_loss(name, head, tokens, teacher.map(torch.Tensor.double), weights.double())
    exact_result = fused_linear_loss(
        *exact_inputs[:2],
        head,
        tokens,
        reference,
        sample_ids=samples,
        bias=exact_inputs[2],
        logit_map=logit_map,
    )
    for a, b in zip(
        gradients, torch.autograd.grad(exact_result.loss_sum, exact_inputs), strict=True
    ):
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert (a.cpu().double() - b).norm() <= tolerance * max(float(b.norm()), 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_on_a_gpu_are_not_rounded_to_half_precision():
    """With a top logit of about 22, rounding logits moves log-probs by 0.01 on average."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 512, generator=generator).bfloat16()
    weight = (0.2 * torch.randn(4000, 512, generator=generator)).bfloat16()
    head = torch.randint(4000, (256, 1), generator=generator)
    tokens = torch.randint(4000, (256,), generator=generator)
    rows, _ = fused_linear_rows(hidden.cuda(), weight.cuda(), head.cuda(), tokens.cuda())
    exact = (hidden.double() @ weight.double().T).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert (rows.token_logprobs.cpu().double() - exact).abs().max() < 1e-3
