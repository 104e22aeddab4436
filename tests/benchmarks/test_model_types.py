"""The table of model types: one type by its whole way, and what the page says of outcomes."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models.types import SLOW, WORKS, Outcome, examine, page


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize(("name", "head"), [("gemma2", "cap 30"), ("granite", "scale 0.125")])
def test_a_type_that_works(name: str, head: str) -> None:
    found = examine(name)
    assert (found.teacher, found.student, found.head) == (WORKS, WORKS, head)
    assert found.rows_error is not None
    assert found.rows_error < 1e-5
    assert found.gradient_error is not None
    assert found.gradient_error < 1e-5


@pytest.mark.filterwarnings("default")
# The head of Bert has another layer before it, that of Dory a factor for each id.
@pytest.mark.parametrize("name", ["bert", "dory"])
def test_a_type_whose_head_is_not_linear(name: str) -> None:
    found = examine(name)
    assert found.teacher.startswith("the logits of the model are not one linear layer")
    assert found.student == SLOW


def test_the_page() -> None:
    found = [
        Outcome(name, model, WORKS if number else "it | broke", WORKS if number else SLOW)
        for number, (name, model) in enumerate(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    ]
    text = page(found)
    assert f"| teacher | {len(found) - 1} of {len(found)} | 99% |" in text
    assert f"| plain | it / broke | {SLOW} |" in text
