"""The table of model types: examinations of a few types, and the page."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models.types import SLOW, WORKS, Outcome, examine, format_page


@pytest.mark.filterwarnings("default")  # those of the model's own code
@pytest.mark.parametrize(("name", "head"), [("gemma2", "cap 30"), ("granite", "scale 0.125")])
def test_a_type_that_works(name: str, head: str) -> None:
    outcome = examine(name)
    assert (outcome.teacher, outcome.student, outcome.head) == (WORKS, WORKS, head)
    assert outcome.rows_error is not None
    assert outcome.rows_error < 1e-5
    assert outcome.gradient_error is not None
    assert outcome.gradient_error < 1e-5


@pytest.mark.filterwarnings("default")
# The head of Bert has another layer before it, that of Dory a factor for each id.
@pytest.mark.parametrize("name", ["bert", "dory"])
def test_a_type_whose_head_is_not_linear(name: str) -> None:
    outcome = examine(name)
    assert outcome.teacher.startswith("the logits of the model are not one linear layer")
    assert outcome.student == SLOW


def test_the_page() -> None:
    outcomes = [
        Outcome(name, model, WORKS if number else "it | broke", WORKS if number else SLOW)
        for number, (name, model) in enumerate(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    ]
    text = format_page(outcomes)
    assert f"| teacher | {len(outcomes) - 1} of {len(outcomes)} | 99% |" in text
    assert f"| plain | it / broke | {SLOW} |" in text
