"""Checks whether sampling uses the same policy as a plain forward pass of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from student_trainer.rollouts.sampler import Sampler

_SHORT, _LONG, _STEPS, _TOP_K = 4, 9, 3, 8


@dataclass(frozen=True)
class SamplingProbe:
    """The result of comparing sampling by `model.generate` with one forward pass.

    - fault: a text why the model cannot sample, or samples from another policy; None without a
      fault.
    - equal_lengths: True if only sequences of equal length may share a batch, because padding fails
      or changes the policy.
    """

    fault: str | None
    equal_lengths: bool


@torch.no_grad()
def probe_sampling(model: Any, tokenizer: Any, *, bf16: bool = False) -> SamplingProbe:
    """Compare the logits of sampling with those of a plain forward pass.

    Sampling runs with one sequence, with two of equal length, and with a padded batch. `model`: a
    transformers causal LM, in evaluation mode. The model runs ten times on at most 11 tokens.
    """
    sampler = Sampler(model, tokenizer, top_k=0, temperature=1.0, bf16=bf16)
    short, long = sampler.plain_ids(_SHORT + _STEPS), sampler.plain_ids(_LONG + _STEPS).flip(0)
    before = [short[:_SHORT], long[:_SHORT], long[:_LONG]]
    after = torch.stack([short[_SHORT:], long[_SHORT:][:_STEPS], long[_LONG:]])
    try:
        alone, paired = (
            sampler.continuation_logits(before[:count], after[:count])[0] for count in (1, 2)
        )
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            ids = short[None, :-1].to(model.device)
            plain = model(input_ids=ids, use_cache=False).logits[0, -_STEPS:]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (a model without sampling raises anything)
        return SamplingProbe(f"sampling fails: {error}", equal_lengths=True)
    # A logit of 64 or more has steps of 0.5 in bfloat16; two passes may round it differently.
    largest = float(plain.topk(min(_TOP_K, plain.shape[-1])).values.abs().max())
    tolerance = max(rounding(model, bf16=bf16), 2 * torch.finfo(plain.dtype).eps * largest)
    plain = plain.float()
    differences = {
        "a sequence with a cache": _largest_difference(plain, alone),
        "two sequences of one length": _largest_difference(plain, paired),
    }
    for case, difference in differences.items():
        if not difference <= tolerance:
            fault = f"sampling {case} differs by {difference:.2g} nats from a plain forward pass"
            return SamplingProbe(fault, equal_lengths=True)
    try:
        padded = sampler.continuation_logits(before[::2], after[::2])[0]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # noqa: BLE001 (a model without padding raises anything)
        return SamplingProbe(None, equal_lengths=True)
    return SamplingProbe(None, equal_lengths=not _largest_difference(plain, padded) <= tolerance)


def rounding(model: Any, *, bf16: bool) -> float:
    """Return the largest difference, in nats, that rounding may cause between equal log-probs."""
    if bf16 or model.dtype != torch.float32:
        return 0.2
    return 2e-2 if model.device.type == "cuda" else 1e-3  # TF32 on a GPU


def _largest_difference(logits: Tensor, other_logits: Tensor) -> float:
    """Return the largest difference, in nats, between log-probs of two tensors of logits [n, V].

    In each row, only the _TOP_K ids that are most likely under `logits` are compared.
    """
    logprobs, other_logprobs = (values.log_softmax(-1) for values in (logits, other_logits))
    top_ids = logprobs.topk(min(_TOP_K, logprobs.shape[-1])).indices
    return float((logprobs - other_logprobs).gather(-1, top_ids).abs().max())
