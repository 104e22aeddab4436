"""The anchor is the average it is said to be, scores as a teacher, and disturbs nothing."""

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
from student_trainer.data.rollout import TailDraws
from student_trainer.losses import fused_linear_top_ids
from student_trainer.model.loading import load_model
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.privileged import privileged_prompt
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


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def anchored(
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
    student, anchor = anchored(model, tau=tau, update_period=period)
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
    _, anchor = anchored(model, tau=0.7, update_period=1)
    for _ in range(50):
        anchor.after_update()
    assert anchor.version == 50
    assert_equal(anchor.state(), weights_of(model))
    assert anchor.gap() == 0


@pytest.mark.parametrize("tau", [0.9, 1.0])
def test_gap_is_the_relative_distance(tau: float) -> None:
    model = tiny.model(seed=2)
    student, anchor = anchored(model, tau=tau)
    for update in range(1, 6):
        move(student, anchor, update)
    theirs = torch.cat([value.flatten() for value in anchor.state().values()]).double()
    ours = torch.cat([value.flatten() for value in weights_of(model).values()]).double()
    assert anchor.gap() == pytest.approx(float((ours - theirs).norm() / theirs.norm()), rel=1e-7)


def test_with_tau_1_it_is_a_frozen_reference() -> None:
    """Weights and rows, bit by bit, while the student learns."""
    model = tiny.model(seed=2)
    frozen = copy.deepcopy(model)
    student, anchor = anchored(model, tau=1.0, update_period=1)
    reference, of_reference = anchored(frozen, tau=1.0)
    expected = rows_of(teacher_of(of_reference, reference), rollouts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        train(student, anchor, optimizer, step)
    assert anchor.version == 0
    assert_equal(anchor.state(), weights_of(frozen))
    for block, other in zip(
        rows_of(teacher_of(anchor, student), rollouts()), expected, strict=True
    ):
        assert bytes_of(block) == bytes_of(other)
    assert anchor.gap() > 0.01, "the student has not moved"


def bytes_of(block: RowBlock) -> list[bytes]:
    assert block.head_ids is not None
    columns = (block.head_ids, block.head_logprobs, block.tail_logmass, block.token_logprobs)
    return [column.tobytes() for column in columns]


def test_scoring_changes_nothing_of_the_training() -> None:
    """The same bits as of a student that no anchor is scored by; also where scoring fails."""
    runs = []
    for scored in (False, True):
        model = tiny.model(seed=2)
        student, anchor = anchored(model)
        places = [parameter.data_ptr() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            train(student, anchor, optimizer, step)
            if scored:
                rows_of(teacher_of(anchor, student), rollouts())
                fail_in_place(anchor)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        runs.append((weights_of(model), anchor.state()))
    for alone, disturbed in zip(*runs, strict=True):
        assert_equal(alone, disturbed)


def fail_in_place(anchor: Anchor) -> None:
    def fail() -> None:
        raise RuntimeError("scoring failed")

    with pytest.raises(RuntimeError, match="scoring failed"), anchor.in_student_place():
        fail()


def model_in_place(anchor: Anchor, student: Replicated | Sharded) -> Any:
    """A model of its own with the anchor's weights."""
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
    student, anchor = anchored(make(), pack=pack)
    for update in range(1, 4):
        move(student, anchor, update)
    model = model_in_place(anchor, student)
    assert_equal(
        {n: v for n, v in weights_of(model).items() if n in anchor.state()}, anchor.state()
    )
    oracle = ModelTeacher(model, temperature=TEMPERATURE, top_k=top_k or 0)
    written = rollouts()
    for rollout, block in zip(
        written, rows_of(teacher_of(anchor, student, top_k=top_k), written), strict=True
    ):
        assert_rows(block, oracle.score(rollout).result())


@pytest.mark.parametrize("make", [tiny.model, soft_capped])
def test_draws_are_scored_beside_the_head(make: Callable[[], Any]) -> None:
    """Against a log_softmax in float64; all else of the rows is as without draws."""
    student, anchor = anchored(make())
    move(student, anchor, 1)
    model, plain = model_in_place(anchor, student), rollouts()
    generator = torch.Generator().manual_seed(1)
    written = []
    for rollout in plain:
        ids = torch.randint(13, (len(rollout.completion), 6), generator=generator)
        draws = TailDraws(ids.int(), torch.zeros(ids.shape))
        written.append(replace(rollout, draws=draws))
    teacher = teacher_of(anchor, student)
    for rollout, block, bare in zip(
        written, rows_of(teacher, written), rows_of(teacher, plain), strict=True
    ):
        assert_rows(block, bare)
        assert rollout.draws is not None
        assert block.draw_logprobs is not None
        exact = completion_logprobs(model, rollout, TEMPERATURE).gather(1, rollout.draws.ids.long())
        np.testing.assert_allclose(block.draw_logprobs, exact.numpy(), rtol=1e-4, atol=2e-5)
        assert bare.draw_logprobs is None


def assert_rows(found: RowBlock, expected: RowBlock) -> None:
    assert found.head_ids is not None
    assert expected.head_ids is not None
    assert found.head_ids.tolist() == expected.head_ids.tolist()
    assert found.head_logprobs.dtype == np.float32
    for name in ("head_logprobs", "tail_logmass", "token_logprobs"):
        one, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_likeliest_ids_are_found_chunk_by_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=generator)
    weight = torch.randn(1000, 8, generator=generator)
    bias = torch.randn(1000, generator=generator)
    found = fused_linear_top_ids(hidden, weight, 5, bias=bias)
    assert torch.equal(found, (hidden @ weight.T + bias).topk(5).indices)
    assert fused_linear_top_ids(hidden[:0], weight, 5).shape == (0, 5)


def test_what_an_environment_wrote_has_rows_too() -> None:
    """As from any teacher: one row a token of the completion."""
    student, anchor = anchored(tiny.model(seed=2))
    (rollout,) = [one for one in rollouts() if len(one.completion) == 5][:1]
    own = torch.tensor([True, False, False, True, True])
    plain, masked = rows_of(teacher_of(anchor, student), [rollout, replace(rollout, own=own)])
    assert len(masked) == 5
    assert_rows(masked, plain)


def test_a_privileged_anchor_reads_a_prompt_of_its_own() -> None:
    """Its sequences, built by hand: rows still stand at the tokens of the completion."""
    words = tiny.tokenizer()
    student, anchor = anchored(tiny.model(seed=2))
    move(student, anchor, 1)
    prompt = privileged_prompt("{hint}={answer}", PromptFormat(template="{prompt}0"), words)
    written = rollouts()
    blocks = rows_of(teacher_of(anchor, student, prompt=prompt), written)
    oracle = ModelTeacher(model_in_place(anchor, student), temperature=TEMPERATURE)
    for number, (rollout, block) in enumerate(zip(written, blocks, strict=True)):
        text = f"{number}+{number}={number}1+2=0"
        ids = torch.tensor([words.convert_tokens_to_ids(character) for character in text])
        by_hand = replace(rollout, token_ids=torch.cat([ids, rollout.completion]), start=len(text))
        assert_rows(block, oracle.score(by_hand).result())
        plain = oracle.score(rollout).result()
        assert np.abs(plain.token_logprobs - block.token_logprobs).max() > 1e-3, "it was not read"


def test_the_context_comes_before_the_last_user_message() -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    form = PromptFormat(messages_column="m", system="9")
    (rollout,) = rollouts(1)
    asked = replace(rollout, fields={"m": TALK, "hint": "3"})
    ids = privileged_prompt("{hint}=", form, words)(asked)
    assert words.decode(ids) == "S9U1+1=A2<|end|>U3=2+2=A"
    spoken = replace(rollout, fields={"hint": "3"})
    ids = privileged_prompt("{hint}=", PromptFormat(system="9"), words)(spoken)
    assert words.decode(ids) == f"S9U3={spoken.text}A"


def test_what_cannot_be_filled_in_is_refused() -> None:
    words = tiny.tokenizer()
    (rollout,) = rollouts(1)
    with pytest.raises(InvalidInput, match="no column 'solution'"):
        privileged_prompt("{solution}", PromptFormat(), words)(rollout)
    with pytest.raises(InvalidInput, match="would read 9 tokens, but it can read only 8"):
        privileged_prompt("{hint}=", PromptFormat(), words, max_tokens=8)(rollout)
    assert len(privileged_prompt("{hint}=", PromptFormat(), words, max_tokens=9)(rollout)) == 8


@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_of_adapters_only_those_are_copied(head: str, tmp_path: Path) -> None:
    base = tiny.save(tiny.model(seed=2), tiny.tokenizer(), tmp_path / "base")
    lora = LoraConfig(rank=3, train_head=head == "trained")
    model = load_model(StudentConfig(model=str(base), lora=lora))
    student, anchor = anchored(model, tau=0.5)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    copied = anchor.state().values()
    assert sum(value.numel() for value in copied) == learned < everything
    assert {value.dtype for value in copied} == {torch.float32}
    for update in range(1, 4):
        move(student, anchor, update)
    save(tmp_path, student, anchor)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "anchor").eval()
    oracle = ModelTeacher(plain, temperature=TEMPERATURE)
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
    _, anchor = anchored(model)
    copied = anchor.state()
    assert sum(v.nbytes for v in copied.values()) == sum(p.nbytes for p in model.parameters())
    assert not {v.data_ptr() for v in copied.values()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_saved_resumed_and_exported(tau: float, tmp_path: Path) -> None:
    model = tiny.model(seed=2)
    student, anchor = anchored(model, tau=tau, update_period=2)
    for update in range(1, 6):
        move(student, anchor, update)
    path = save(tmp_path, student, anchor)
    assert is_intact(path)
    assert_equal(load_file(path / "anchor.safetensors"), anchor.state())

    resumed, again = anchored(load_model(StudentConfig(model=str(path / "model"))), tau=tau)
    checkpoint.load_anchor(path, again)
    assert (again.updates, again.version) == (anchor.updates, anchor.version)
    assert_equal(again.state(), anchor.state())
    for update in (6, 7):
        move(student, anchor, update)
        move(resumed, again, update)
    assert_equal(again.state(), anchor.state())
    assert again.version == anchor.version == (3 if tau < 1 else 0)


def test_the_export_has_both_models(tmp_path: Path) -> None:
    model = tiny.model(seed=2)
    student, anchor = anchored(model)
    for update in range(1, 6):
        move(student, anchor, update)
    save(tmp_path, student, anchor)
    exported = tmp_path / "export"
    assert_equal(weights_of(AutoModelForCausalLM.from_pretrained(exported)), weights_of(model))
    theirs = AutoModelForCausalLM.from_pretrained(exported / "anchor")
    assert_equal(weights_of(theirs), anchor.state())
    assert is_intact(exported)
    assert (exported / "anchor" / "tokenizer.json").is_file()


def test_a_run_without_an_anchor_is_not_resumed_with_one(tmp_path: Path) -> None:
    student, anchor = anchored(tiny.model(seed=2))
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
