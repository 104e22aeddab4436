"""Heads that scale and cap logits: found by the probe, and computed by the fused operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from student_trainer.losses import LogitMap
from student_trainer.model.probes import find_logit_map
from student_trainer.model.student import Student
from tests.student_trainer import tiny
from tests.student_trainer.model.test_student import batch_of, gradients_of

SIZES = {
    "vocab_size": 13,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def family(name: str, **values: Any) -> Callable[[], Any]:
    """Return a constructor of a tiny model with logits large enough for a cap to change them."""

    def make_family() -> Any:
        torch.manual_seed(5)
        config = getattr(transformers, name)(**{**SIZES, **values})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=0.3)
        return model

    return make_family


HEADS: dict[str, tuple[Callable[[], Any], LogitMap]] = {
    "gemma2": (family("Gemma2Config", final_logit_softcapping=4.0), LogitMap(cap=4.0)),
    "gemma3": (family("Gemma3TextConfig"), LogitMap()),
    "gemma3 capped": (family("Gemma3TextConfig", final_logit_softcapping=3.0), LogitMap(cap=3.0)),
    "granite": (family("GraniteConfig", logits_scaling=8.0), LogitMap(scale=0.125)),
    "cohere": (family("CohereConfig", logit_scale=0.0625), LogitMap(scale=0.0625)),
    "cohere2": (family("Cohere2Config", logit_scale=0.25), LogitMap(scale=0.25)),
    "nanochat": (family("NanoChatConfig", final_logit_softcapping=15.0), LogitMap(cap=15.0)),
    "minicpm3": (family("MiniCPM3Config", **LATENT), LogitMap(scale=1.0)),
}
EVERY_HEAD = pytest.mark.parametrize("name", HEADS)


@EVERY_HEAD
def test_the_probe_finds_the_head(name: str) -> None:
    make, expected = HEADS[name]
    logit_map = find_logit_map(make())
    assert logit_map is not None
    assert logit_map.cap == expected.cap
    if name != "minicpm3":  # which scales its states by a factor of its sizes instead
        assert logit_map.scale == pytest.approx(expected.scale, rel=1e-6)


@EVERY_HEAD
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_path_is_the_plain_one(name: str, dtype: torch.dtype) -> None:
    """Compared with the model's logits: equal up to the rounding of the dtype."""
    model = HEADS[name][0]()
    batch = batch_of(model)
    student = Student(model.to(dtype))
    assert student._logit_map is not None
    fused_result, fused_grads = gradients_of(student, batch)
    student._logit_map = None
    plain_result, plain_grads = gradients_of(student, batch)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-9
    size = float(plain_result.metrics["loss"].abs().sum())
    assert abs(float((fused_result.loss_sum - plain_result.loss_sum).detach())) < tolerance * size
    assert fused_grads.keys() == plain_grads.keys()
    for key, grad in fused_grads.items():
        # Both float32 gradients through the layers have rounding errors.
        bound = 10 * tolerance * max(float(plain_grads[key].norm()), 1e-3)
        assert float((grad - plain_grads[key]).norm()) < bound, key


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_padding_is_left_out(name: str, fused: bool) -> None:
    """The last 3 of 16 ids are padding: rows and gradients equal those of a model without them."""
    torch.manual_seed(0)
    narrow = HEADS[name][0]()
    batch = batch_of(narrow)
    wide = HEADS[name][0]()
    wide.resize_token_embeddings(16, mean_resizing=False)
    with torch.no_grad():
        wide.get_output_embeddings().weight[13:].normal_(std=2.0)
    students = [Student(narrow), Student(wide, vocab_size=13)]
    if not fused:
        for student in students:
            student._logit_map = None
    (narrow_result, narrow_gradients), (wide_result, wide_gradients) = (
        gradients_of(tested_student, batch) for tested_student in students
    )
    torch.testing.assert_close(wide_result.loss_sum, narrow_result.loss_sum)
    torch.testing.assert_close(wide_result.metrics["entropy"], narrow_result.metrics["entropy"])
    for key, grad in narrow_gradients.items():
        unpadded = wide_gradients[key][: len(grad)]
        torch.testing.assert_close(unpadded, grad, rtol=1e-5, atol=1e-6)
        assert (wide_gradients[key][len(grad) :] == 0).all()
    every_row = Student(wide).rows(batch, 1.0)[1]
    torch.testing.assert_close(
        students[1].rows(batch, 1.0, every_id=True)[1].token_logprobs, every_row.token_logprobs
    )
    ids, _ = students[1].rows(batch, 1.0, top_k=13)
    assert int(ids.max()) == 12


def test_a_head_that_fits_neither_takes_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(seed=4)
    forward = type(model).forward

    def square_logits(*inputs: Any, **options: Any) -> Any:
        out = forward(*inputs, **options)
        out.logits = out.logits * out.logits.abs()
        return out

    monkeypatch.setattr(type(model), "forward", square_logits)
    assert find_logit_map(model) is None
    assert Student(model)._logit_map is None


class _ScaledHead(torch.nn.Linear):
    """A head with a trained factor for each id, initially 1."""

    def __init__(self, like: torch.nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.weight = like.weight
        self.factors = torch.nn.Parameter(torch.ones(like.out_features))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * self.factors


def test_a_head_with_weights_of_its_own_takes_the_plain_path() -> None:
    model = tiny.model(seed=4)
    model.lm_head = _ScaledHead(model.get_output_embeddings())
    assert find_logit_map(model) is None
