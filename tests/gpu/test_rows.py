"""Rows of student and teacher, and sampled tokens, against float64 and the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.loss.methods import unbiased_kl
from benchmarks.loss.problem import make_problem
from student_trainer.losses import LogitMap, fused_linear_loss, fused_linear_rows
from student_trainer.losses.fused import softmax_torch
from student_trainer.losses.fused.logit_map import LogitCurve
from student_trainer.rollouts.sample_step import sample_step
from teacher_service.head.scoring import score_hidden
from tests.gpu.differences import by_device, relative_difference
from tests.student_trainer import tiny
from tests.student_trainer.rollouts.test_tail_draws import generate_rollouts

pytestmark = pytest.mark.gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize("curve", [LogitCurve(1.0), LogitCurve(0.7), LogitCurve(30.0, 30.0)])
@pytest.mark.parametrize("vocab", [151_936, 151_665, 262_144, 50_257])
def test_kernels_at_real_vocabularies(vocab: int, curve: LogitCurve, device: torch.device) -> None:
    from student_trainer.losses.fused import softmax_triton

    logits = 4 * torch.randn(64, vocab, device=device)
    logits[:, ::7] = -torch.inf
    exact_logits = logits.double()
    exact = softmax_torch.tail_statistics(exact_logits, curve)
    statistics = softmax_triton.tail_statistics(logits, curve)
    for values, exact_values in zip(statistics, exact, strict=True):
        assert relative_difference(values, exact_values) < 1e-5
    scale = torch.linspace(-2, 2, 64, device=device)
    out = torch.full((64, vocab), torch.nan, dtype=torch.bfloat16, device=device)
    softmax_triton.scaled_exp(logits, statistics[0], scale, curve, out)
    exact_out = softmax_torch.scaled_exp(
        exact_logits, exact[0], scale.double(), curve, exact_logits
    )
    assert relative_difference(out, exact_out) < 5e-3


@needs_gpu
def test_offsets_beyond_2_31(device: torch.device) -> None:
    """The last rows of [16400, 262144] begin behind 4.29e9 entries; 8.6 GB of bfloat16."""
    from student_trainer.losses.fused import softmax_triton

    logits = torch.zeros(16_400, 262_144, dtype=torch.bfloat16, device=device)
    logits[-2:] = torch.randn(2, 262_144, device=device)
    top, total, _ = softmax_triton.tail_statistics(logits, LogitCurve(1.0))
    exact = torch.logsumexp(logits[-2:].double(), 1)
    assert relative_difference(top[-2:].double() + total[-2:].double().log(), exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_the_fused_loss(is_narrow: bool, dtype: torch.dtype, device: torch.device) -> None:
    count, vocab, width = by_device((1500, 151_936, 896), (40, 3000, 32))
    logit_map = LogitMap(vocab - 129, 0.5, 30.0) if is_narrow else LogitMap()
    problem = make_problem(count, vocab - 200, width, 64, device=device.type, dtype=dtype)
    padding = torch.randn(200, width, device=device, dtype=dtype) * (2 / width**0.5)
    weight = torch.cat([problem.weight.detach(), padding]).requires_grad_()
    gradients: list[Any] = []
    for inputs, head in ((problem, weight), (problem.double(), weight.detach().double())):
        head = head.requires_grad_()
        fused = fused_linear_loss(
            inputs.hidden,
            head,
            inputs.head_ids,
            inputs.token_ids,
            unbiased_kl(inputs),
            logit_map=logit_map,
        )
        gradients.append(torch.autograd.grad(fused.loss_sum, (inputs.hidden, head)))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for gradient, exact in zip(*gradients, strict=True):
        assert relative_difference(gradient, exact) < tolerance


def test_both_operators_have_one_gradient(device: torch.device) -> None:
    count, vocab, width = by_device((1500, 151_936, 896), (40, 3000, 32))
    problem = make_problem(count, vocab, width, 64, device=device.type, dtype=torch.bfloat16)
    inputs = (problem.hidden, problem.weight, problem.head_ids, problem.token_ids)
    loss_fn = unbiased_kl(problem)
    fused = fused_linear_loss(*inputs, loss_fn).loss_sum
    rows, _ = fused_linear_rows(*inputs)
    (gradient,) = torch.autograd.grad(fused, problem.hidden)
    (from_rows,) = torch.autograd.grad(loss_fn(rows, slice(None)).sum(), problem.hidden)
    assert relative_difference(from_rows, gradient) < 1e-2


def test_teacher_rows(device: torch.device) -> None:
    count, vocab, width = by_device((700, 152_064, 896), (40, 3000, 32))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator).bfloat16().to(device)
    weight = 2 / width**0.5 * torch.randn(vocab, width, generator=generator)
    weight = weight.bfloat16().to(device)
    tokens = torch.randint(vocab, (count,), generator=generator).to(device)
    uniforms = torch.rand(count, 16, dtype=torch.float64, generator=generator).to(device)
    options: dict[str, Any] = {"token_ids": tokens, "temperature": 0.8}
    rows = score_hidden(hidden, weight, top_k=64, head_ids=None, uniforms=uniforms, **options)
    assert rows.sample_ids is not None
    assert rows.sample_logprob is not None
    exact = (hidden.double() @ weight.double().T / 0.8).log_softmax(1)
    # A CPU rounds the products of bfloat16 numbers to bfloat16; a GPU sums them in float32.
    tolerance = by_device(2e-3, 0.1)
    for values, exact_values in (
        (rows.head_logprobs, exact.gather(1, rows.head_ids)),
        (rows.token_logprobs, exact.gather(1, tokens[:, None])[:, 0]),
        (rows.sample_logprob, exact.gather(1, rows.sample_ids).mean(1)),
    ):
        assert float((values.double() - exact_values).abs().max()) < tolerance
    outside = exact.scatter(1, rows.head_ids, -torch.inf).logsumexp(1)
    assert float((rows.tail_logmass.double() - outside).abs().max()) < tolerance
    given = score_hidden(
        hidden, weight, top_k=None, head_ids=rows.head_ids, draw_ids=rows.sample_ids, **options
    )
    torch.testing.assert_close(given.head_logprobs, rows.head_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampled_tokens_and_draws_are_those_of_the_cpu(top_p: float, device: torch.device) -> None:
    batch, vocab = by_device((64, 151_936), (8, 3000))
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(batch, vocab, generator=generator)
    uniforms = torch.rand(2, batch, dtype=torch.float64, generator=generator)

    def sample(place: torch.device) -> Any:
        token, draw = uniforms.to(place)
        return sample_step(
            logits.to(place), top_k=16, temperature=0.7, uniforms=token, top_p=top_p,
            draws=48, draw_uniforms=draw,
        )  # fmt: skip

    expected, step = sample(torch.device("cpu")), sample(device)
    # A sum in another order may move a boundary across a uniform number.
    assert (step.token_ids.cpu() == expected.token_ids).double().mean() > 0.95
    assert (step.head_ids.cpu() == expected.head_ids).double().mean() > 0.99
    torch.testing.assert_close(step.logprobs.cpu(), expected.logprobs, rtol=0, atol=1e-4)
    is_same = step.draws.ids.cpu() == expected.draws.ids
    assert is_same.double().mean() > 0.99
    torch.testing.assert_close(
        step.draws.logprobs.cpu()[is_same], expected.draws.logprobs[is_same], rtol=0, atol=1e-4
    )


@torch.no_grad()
def test_sampled_log_probs_are_those_of_a_forward_pass(device: torch.device) -> None:
    model = tiny.model(seed=3, layers=2).to(device)
    for rollout in generate_rollouts(model, range(5)):
        logits = model(rollout.token_ids[None].to(device), use_cache=False).logits[0]
        exact = logits[rollout.start - 1 : -1].double().log_softmax(1).cpu()
        logprobs = exact.gather(1, rollout.completion[:, None])[:, 0]
        difference = (logprobs - rollout.token_logprobs.double()).abs().max()
        assert float(difference) < 1e-3
