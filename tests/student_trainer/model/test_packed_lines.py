"""A batch that says whether its lines are packed gets the masks of one whose positions are read."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, masking_utils

from student_trainer.data.batch import make_batch
from student_trainer.data.packing import Layout
from student_trainer.model import packed_lines
from student_trainer.model.packed_lines import known_packing
from student_trainer.model.student import Student
from tests.student_trainer.data.test_packing import random_items

SEVERAL = torch.tensor([[0, 1, 2, 0, 1, 0]])
ONE = torch.arange(6)[None]


@pytest.mark.parametrize(("positions", "is_packed"), [(SEVERAL, True), (ONE, False)])
def test_sequence_numbers_are_those_of_transformers(
    positions: torch.Tensor, is_packed: bool
) -> None:
    expected = masking_utils.find_packed_sequence_indices(positions)
    assert (expected is not None) == is_packed
    with known_packing(is_packed):
        numbers = masking_utils.find_packed_sequence_indices(positions)
    if expected is None:
        assert numbers is None
    else:
        assert torch.equal(numbers, expected)


@pytest.mark.parametrize("layout", ["padded", "lines"])
def test_states_do_not_change(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full and sliding attention, which have a mask each."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    student = Student(Gemma3ForCausalLM(config).eval())
    batch = make_batch(random_items([9, 7, 4, 3]), torch.device("cpu"), layout)
    assert (batch.position_ids is not None) == (layout == "lines")
    reads: list[object] = []
    with monkeypatch.context() as context:
        context.setattr(packed_lines, "_find_by_reading", reads.append)
        states = student.states(batch)
    assert not reads
    with torch.no_grad():
        body = student.model.get_decoder()
        expected = batch.select(body(**batch.inputs, use_cache=False).last_hidden_state)
    assert torch.equal(states, expected)
