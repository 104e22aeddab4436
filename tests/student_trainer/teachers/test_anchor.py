"""The anchor is the documented average, scores as a teacher, and does not affect training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from clients.config.tables.common import LoraConfig, StudentConfig
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.atomic_directory import is_intact
from student_trainer.checkpoints.export import export_model
from student_trainer.data.sequence import TailDraws
from student_trainer.losses import fused_linear_top_ids
from student_trainer.model.loading import load_model
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.teacher_input import privileged_prompt
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.student_trainer import tiny
from tests.student_trainer.model.test_student import soft_capped, untied
from tests.student_trainer.model_teacher import ModelTeacher, completion_logprobs
from tests.student_trainer.saving import save_checkpoint
from tests.student_trainer.teachers.anchors import (
    TEMPERATURE,
    move,
    rollouts,
    rows_of,
    spread_student,
    teacher_of,
    theta,
)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def make_anchored(
    model: Any, *, tau: float = 0.9, update_period: int = 2, **options: bool
) -> tuple[Replicated | Sharded, Anchor]:
    student = spread_student(model, **options)
    return student, Anchor(student, tau=tau, update_period=update_period)


def train(student: Replicated | Sharded, anchor: Anchor, optimizer: Any, step: int) -> None:
    ids = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(step))
    student.trained.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    anchor.after_update()


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("period", [1, 3])
def test_it_is_the_closed_form(tau: float, period: int) -> None:
    """phi_v = tau^v phi_0 + (1 - tau) sum_j tau^(v - j) theta_(j period), in float64."""
    model = tiny.model(seed=2)
    student, anchor = make_anchored(model, tau=tau, update_period=period)
    first = {name: value.double() for name, value in weights_of(model).items()}
    updates = 11
    for update in range(1, updates + 1):
        before = {name: value.clone() for name, value in anchor.state().items()}
        move(student, anchor, update)
        if update % period:
            assert_equal(anchor.state(), before)
    version = updates // period
    assert (anchor.updates, anchor.version) == (updates, version)
    for name, start in first.items():
        expected = tau**version * start
        for j in range(1, version + 1):
            expected += (1 - tau) * tau ** (version - j) * theta(name, start, j * period).double()
        torch.testing.assert_close(anchor.state()[name].double(), expected, rtol=2e-6, atol=2e-7)


def test_where_the_student_stays_it_does_not_drift() -> None:
    model = tiny.model(seed=2)
    _, anchor = make_anchored(model, tau=0.7, update_period=1)
    for _ in range(50):
        anchor.after_update()
    assert anchor.version == 50
    assert_equal(anchor.state(), weights_of(model))
    assert anchor.gap() == 0


@pytest.mark.parametrize("tau", [0.9, 1.0])
def test_gap_is_the_relative_distance(tau: float) -> None:
    model = tiny.model(seed=2)
    student, anchor = make_anchored(model, tau=tau)
    for update in range(1, 6):
        move(student, anchor, update)
    anchor_values = torch.cat([value.flatten() for value in anchor.state().values()]).double()
    student_values = torch.cat([value.flatten() for value in weights_of(model).values()]).double()
    assert anchor.gap() == pytest.approx(
        float((student_values - anchor_values).norm() / anchor_values.norm()), rel=1e-7
    )


def test_with_tau_1_it_is_a_frozen_reference() -> None:
    """Weights and rows stay bit-identical while the student learns."""
    model = tiny.model(seed=2)
    frozen_model = copy.deepcopy(model)
    student, anchor = make_anchored(model, tau=1.0, update_period=1)
    reference, reference_anchor = make_anchored(frozen_model, tau=1.0)
    expected = rows_of(teacher_of(reference_anchor, reference), rollouts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        train(student, anchor, optimizer, step)
    assert anchor.version == 0
    assert_equal(anchor.state(), weights_of(frozen_model))
    for block, expected_block in zip(
        rows_of(teacher_of(anchor, student), rollouts()), expected, strict=True
    ):
        assert bytes_of(block) == bytes_of(expected_block)
    assert anchor.gap() > 0.01, "the student has not moved"


def bytes_of(block: RowBlock) -> list[bytes]:
    assert block.head_ids is not None
    columns = (block.head_ids, block.head_logprobs, block.tail_logmass, block.token_logprobs)
    return [column.tobytes() for column in columns]


def test_scoring_changes_nothing_of_the_training() -> None:
    """Training is bit-identical to training without scoring, also if scoring fails."""
    runs = []
    for is_scored in (False, True):
        model = tiny.model(seed=2)
        student, anchor = make_anchored(model)
        places = [parameter.data_ptr() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            train(student, anchor, optimizer, step)
            if is_scored:
                rows_of(teacher_of(anchor, student), rollouts())
                fail_in_place(anchor)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        runs.append((weights_of(model), anchor.state()))
    for undisturbed, disturbed in zip(*runs, strict=True):
        assert_equal(undisturbed, disturbed)


def fail_in_place(anchor: Anchor) -> None:
    def fail() -> None:
        raise RuntimeError("scoring failed")

    with pytest.raises(RuntimeError, match="scoring failed"), anchor.in_student_place():
        fail()


def model_in_place(anchor: Anchor, student: Replicated | Sharded) -> Any:
    """Return a copy of the model with the anchor's weights."""
    with anchor.in_student_place():
        return copy.deepcopy(student.full.model).eval()


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "make",
    [lambda: tiny.model(seed=2), lambda: untied(True), soft_capped],
    ids=["tied", "bias", "capped"],
)
@pytest.mark.parametrize("top_k", [None, 3], ids=["their heads", "its heads"])
def test_rows_are_those_of_the_averaged_model(
    make: Callable[[], Any], pack: bool, top_k: int | None
) -> None:
    student, anchor = make_anchored(make(), pack=pack)
    for update in range(1, 4):
        move(student, anchor, update)
    model = model_in_place(anchor, student)
    assert_equal(
        {n: v for n, v in weights_of(model).items() if n in anchor.state()}, anchor.state()
    )
    oracle = ModelTeacher(model, temperature=TEMPERATURE, top_k=top_k or 0)
    sequences = rollouts()
    for rollout, block in zip(
        sequences, rows_of(teacher_of(anchor, student, top_k=top_k), sequences), strict=True
    ):
        assert_rows(block, oracle.score(rollout).result())


@pytest.mark.parametrize("make", [tiny.model, soft_capped])
def test_draws_are_scored_beside_the_head(make: Callable[[], Any]) -> None:
    """Compared with a log_softmax in float64; the other columns equal those without draws."""
    student, anchor = make_anchored(make())
    move(student, anchor, 1)
    model, plain_rollouts = model_in_place(anchor, student), rollouts()
    generator = torch.Generator().manual_seed(1)
    drawn_rollouts = []
    for rollout in plain_rollouts:
        ids = torch.randint(13, (len(rollout.completion), 6), generator=generator)
        draws = TailDraws(ids.int(), torch.zeros(ids.shape))
        drawn_rollouts.append(replace(rollout, draws=draws))
    teacher = teacher_of(anchor, student)
    for rollout, block, plain_block in zip(
        drawn_rollouts,
        rows_of(teacher, drawn_rollouts),
        rows_of(teacher, plain_rollouts),
        strict=True,
    ):
        assert_rows(block, plain_block)
        assert rollout.draws is not None
        assert block.draw_logprobs is not None
        exact_logprobs = completion_logprobs(model, rollout, TEMPERATURE).gather(
            1, rollout.draws.ids.long()
        )
        np.testing.assert_allclose(
            block.draw_logprobs, exact_logprobs.numpy(), rtol=1e-4, atol=2e-5
        )
        assert plain_block.draw_logprobs is None


def assert_rows(actual: RowBlock, expected: RowBlock) -> None:
    assert actual.head_ids is not None
    assert expected.head_ids is not None
    assert actual.head_ids.tolist() == expected.head_ids.tolist()
    assert actual.head_logprobs.dtype == np.float32
    for name in ("head_logprobs", "tail_logmass", "token_logprobs"):
        values, expected_values = getattr(actual, name), getattr(expected, name)
        np.testing.assert_allclose(values, expected_values, rtol=1e-4, atol=2e-5)


def test_likeliest_ids_are_found_chunk_by_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=generator)
    weight = torch.randn(1000, 8, generator=generator)
    bias = torch.randn(1000, generator=generator)
    top_ids = fused_linear_top_ids(hidden, weight, 5, bias=bias)
    assert torch.equal(top_ids, (hidden @ weight.T + bias).topk(5).indices)
    assert fused_linear_top_ids(hidden[:0], weight, 5).shape == (0, 5)


def test_what_an_environment_wrote_has_rows_too() -> None:
    """As for any teacher, there is one row per token of the completion."""
    student, anchor = make_anchored(tiny.model(seed=2))
    (rollout,) = [candidate for candidate in rollouts() if len(candidate.completion) == 5][:1]
    own_mask = torch.tensor([True, False, False, True, True])
    plain_rows, masked_rows = rows_of(
        teacher_of(anchor, student), [rollout, replace(rollout, own=own_mask)]
    )
    assert len(masked_rows) == 5
    assert_rows(masked_rows, plain_rows)


def test_a_privileged_anchor_reads_a_prompt_of_its_own() -> None:
    """Compared with sequences built by hand; rows are at the tokens of the completion."""
    words = tiny.tokenizer()
    student, anchor = make_anchored(tiny.model(seed=2))
    move(student, anchor, 1)
    prompt = privileged_prompt("{hint}={answer}", PromptFormat(template="{prompt}0"), words)
    sequences = rollouts()
    blocks = rows_of(teacher_of(anchor, student, prompt=prompt), sequences)
    oracle = ModelTeacher(model_in_place(anchor, student), temperature=TEMPERATURE)
    for number, (rollout, block) in enumerate(zip(sequences, blocks, strict=True)):
        text = f"{number}+{number}={number}1+2=0"
        ids = torch.tensor([words.convert_tokens_to_ids(character) for character in text])
        handmade_rollout = replace(
            rollout, token_ids=torch.cat([ids, rollout.completion]), start=len(text)
        )
        assert_rows(block, oracle.score(handmade_rollout).result())
        plain_rows = oracle.score(rollout).result()
        assert np.abs(plain_rows.token_logprobs - block.token_logprobs).max() > 1e-3, (
            "it was not read"
        )


def test_the_context_comes_before_the_last_user_message() -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    form = PromptFormat(messages_column="m", system="9")
    (rollout,) = rollouts(1)
    talk_rollout = replace(rollout, fields={"m": TALK, "hint": "3"})
    ids = privileged_prompt("{hint}=", form, words)(talk_rollout)
    assert words.decode(ids) == "S9U1+1=A2<|end|>U3=2+2=A"
    text_rollout = replace(rollout, fields={"hint": "3"})
    ids = privileged_prompt("{hint}=", PromptFormat(system="9"), words)(text_rollout)
    assert words.decode(ids) == f"S9U3={text_rollout.text}A"


def test_what_cannot_be_filled_in_is_refused() -> None:
    words = tiny.tokenizer()
    (rollout,) = rollouts(1)
    with pytest.raises(InvalidInput, match="no column 'solution'"):
        privileged_prompt("{solution}", PromptFormat(), words)(rollout)
    with pytest.raises(InvalidInput, match="would read 9 tokens, more than its limit of 8"):
        privileged_prompt("{hint}=", PromptFormat(), words, max_tokens=8)(rollout)
    assert len(privileged_prompt("{hint}=", PromptFormat(), words, max_tokens=9)(rollout)) == 8


@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_of_adapters_only_those_are_copied(head: str, tmp_path: Path) -> None:
    base = tiny.save(tiny.model(seed=2), tiny.tokenizer(), tmp_path / "base")
    lora = LoraConfig(rank=3, train_head=head == "trained")
    model = load_model(StudentConfig(model=str(base), lora=lora))
    student, anchor = make_anchored(model, tau=0.5)
    trained_elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    all_elements = sum(p.numel() for p in model.parameters())
    anchor_values = anchor.state().values()
    assert sum(value.numel() for value in anchor_values) == trained_elements < all_elements
    assert {value.dtype for value in anchor_values} == {torch.float32}
    for update in range(1, 4):
        move(student, anchor, update)
    save(tmp_path, student, anchor)
    exported_model = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "anchor").eval()
    oracle = ModelTeacher(exported_model, temperature=TEMPERATURE)
    for rollout, block in zip(
        rollouts(), rows_of(teacher_of(anchor, student), rollouts()), strict=True
    ):
        assert_rows(block, oracle.score(rollout).result())


def save(root: Path, student: Replicated | Sharded, anchor: Anchor) -> Path:
    model, words = student.trained.model, tiny.tokenizer()
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(root, 4, model=model, tokenizer=words, optimizer=optimizer, anchor=anchor)
    export_model(root / "export", model=model, tokenizer=words, anchor=anchor)
    return checkpoint.checkpoint_path(root, 4)


def test_one_more_copy_and_no_more() -> None:
    model = tiny.model(seed=2)
    _, anchor = make_anchored(model)
    anchor_values = anchor.state()
    assert sum(v.nbytes for v in anchor_values.values()) == sum(
        p.nbytes for p in model.parameters()
    )
    assert not {v.data_ptr() for v in anchor_values.values()} & {
        p.data_ptr() for p in model.parameters()
    }


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_saved_resumed_and_exported(tau: float, tmp_path: Path) -> None:
    model = tiny.model(seed=2)
    student, anchor = make_anchored(model, tau=tau, update_period=2)
    for update in range(1, 6):
        move(student, anchor, update)
    path = save(tmp_path, student, anchor)
    assert is_intact(path)
    assert_equal(load_file(path / "anchor.safetensors"), anchor.state())

    resumed_student, resumed_anchor = make_anchored(
        load_model(StudentConfig(model=str(path / "model"))), tau=tau
    )
    checkpoint.load_anchor(path, resumed_anchor)
    assert (resumed_anchor.updates, resumed_anchor.version) == (anchor.updates, anchor.version)
    assert_equal(resumed_anchor.state(), anchor.state())
    for update in (6, 7):
        move(student, anchor, update)
        move(resumed_student, resumed_anchor, update)
    assert_equal(resumed_anchor.state(), anchor.state())
    assert resumed_anchor.version == anchor.version == (3 if tau < 1 else 0)


def test_the_export_has_both_models(tmp_path: Path) -> None:
    model = tiny.model(seed=2)
    student, anchor = make_anchored(model)
    for update in range(1, 6):
        move(student, anchor, update)
    save(tmp_path, student, anchor)
    exported = tmp_path / "export"
    assert_equal(weights_of(AutoModelForCausalLM.from_pretrained(exported)), weights_of(model))
    anchor_model = AutoModelForCausalLM.from_pretrained(exported / "anchor")
    assert_equal(weights_of(anchor_model), anchor.state())
    assert is_intact(exported)
    assert (exported / "anchor" / "tokenizer.json").is_file()


def test_a_run_without_an_anchor_is_not_resumed_with_one(tmp_path: Path) -> None:
    student, anchor = make_anchored(tiny.model(seed=2))
    model = student.trained.model
    save_checkpoint(
        tmp_path,
        1,
        model=model,
        tokenizer=tiny.tokenizer(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    with pytest.raises(InvalidInput, match="step-000001 has no anchor"):
        checkpoint.load_anchor(checkpoint.checkpoint_path(tmp_path, 1), anchor)
