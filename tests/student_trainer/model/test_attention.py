"""The choice of a student's attention, and the inputs of variable-length flash attention."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_attention

from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput
from student_trainer.data.batch import make_batch
from student_trainer.data.packing import Layout, micro_batches
from student_trainer.model import attention
from student_trainer.model.attention import choose_attention
from student_trainer.model.student import Student
from tests.student_trainer import tiny
from tests.student_trainer.data.test_packing import losses_and_gradients, random_items


def plain_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """Attention by its definition, with flash-attn's interface, [B, T, heads, size]."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def plain_flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Attention of each sequence separately, [T, heads, size]."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    ends = cu_seqlens_q.tolist()
    parts = [
        plain_flash(q[None, i:j], k[None, i:j], v[None, i:j], causal, softmax_scale)[0]
        for i, j in pairwise(ends)
    ]
    return torch.cat(parts)


@pytest.fixture
def install_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers call plain CPU functions in place of flash-attn's kernels."""
    process = flash_attention._lazy_define_process_function(plain_flash_varlen)
    name = "flash_attention_2"
    for attribute, value in {
        "_loaded_implementation": name,
        "_flash_fn": plain_flash,
        "_flash_varlen_fn": plain_flash_varlen,
        "_pad_fn": flash_attention._pad_input,
        "_unpad_fn": flash_attention._unpad_input,
        "_process_flash_kwargs_fn": process,
        "_process_with_kvcache_kwargs_fn": dict,
    }.items():
        # transformers before 5.20 lacks one of them.
        monkeypatch.setattr(flash_attention, attribute, value, raising=False)


def make_flash_student() -> Student:
    model = tiny.model(seed=3, layers=2)
    # `set_attn_implementation` asks for a GPU.
    model.config._attn_implementation_internal = "flash_attention_2"
    student = Student(model)
    choose_attention(student, student, StudentConfig(model="-"))
    return student


@pytest.mark.usefixtures("install_flash")
def test_one_line_of_all_sequences_is_each_alone() -> None:
    student = make_flash_student()
    assert student.layout == "one_line"
    items = random_items([9, 2, 5, 3, 3, 7, 2, 4, 6, 2])
    groups = micro_batches(items, 18, "one_line")
    for group in groups:
        batch = make_batch(group, torch.device("cpu"), "one_line")
        assert batch.input_ids.shape == (1, sum(len(item.sequence.token_ids) for item in group))
    assert 1 < len(groups) < len(items)
    line_losses, line_gradients = losses_and_gradients(student, groups, "one_line")
    plain_student = Student(tiny.model(seed=3, layers=2))
    assert plain_student.model.config._attn_implementation == "sdpa"
    padded_losses, padded_gradients = losses_and_gradients(
        plain_student, [[item] for item in items], "padded"
    )
    for name, losses in padded_losses.items():
        torch.testing.assert_close(line_losses[name], losses, rtol=1e-5, atol=1e-5)
    for name, grad in padded_gradients.items():
        assert float((line_gradients[name] - grad).norm() / grad.norm()) < 1e-5, name


@pytest.mark.usefixtures("install_flash")
def test_a_flash_attention_that_reads_across_sequences_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend_across(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return plain_flash(q[None], k[None], v[None], options["causal"])[0]

    monkeypatch.setattr(flash_attention, "_flash_varlen_fn", attend_across)
    assert make_flash_student().layout == "padded"


@pytest.mark.parametrize(
    ("requested", "implementation"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")]
)
def test_on_a_cpu(requested: Any, implementation: str) -> None:
    student = Student(tiny.model(seed=3))
    choose_attention(student, student, StudentConfig(model="-", attention=requested))
    assert student.model.config._attn_implementation == implementation
    assert student.layout == "lines"


def test_flash_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="needs dtype = 'bfloat16'"):
        StudentConfig(model="-", attention="flash", dtype="float32")
    settings = StudentConfig(model="-", attention="flash", dtype="bfloat16")
    student = Student(tiny.model(seed=3), bf16=True)
    with pytest.raises(InvalidInput, match="flash attention needs an NVIDIA GPU") as caught:
        choose_attention(student, student, settings)
    assert caught.value.field == "student.attention"


def test_a_line_of_everything_takes_any_lengths() -> None:
    layout: Layout = "one_line"
    items = random_items([30, 4, 9, 2])
    groups = micro_batches(items, 16, layout)
    lengths = [[len(item.sequence.token_ids) for item in group] for group in groups]
    assert lengths == [[30], [9, 4, 2]]


@pytest.mark.parametrize(
    ("device", "bf16", "compatible", "installed", "implementation"),
    [
        ("cuda", True, None, "flash_attention_2", "flash_attention_2"),
        ("cuda", True, ["flash_attention_2"], "flash_attention_2", "flash_attention_2"),
        ("cuda", True, ["kernels-community/other"], "flash_attention_2", None),
        ("cuda", True, None, None, None),
        ("cuda", False, None, "flash_attention_2", None),
        ("cpu", True, None, "flash_attention_2", None),
    ],
)
def test_auto_takes_what_is_installed(
    device: str,
    bf16: bool,
    compatible: list[str] | None,
    installed: str | None,
    implementation: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a kernel of the hub, nor flash attention in float32."""
    monkeypatch.setattr(attention, "_installed_flash", lambda: installed)
    model = SimpleNamespace(
        device=torch.device(device), _compatible_flash_implementations=compatible
    )
    student: Any = SimpleNamespace(model=model, bf16=bf16)
    assert attention._choose_implementation(student, "auto") == implementation
