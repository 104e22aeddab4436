"""The table of model types: examinations of a few types, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models.types import (
    SLOW,
    WORKS,
    Outcome,
    examine,
    examine_in_process,
    format_page,
    list_cells,
)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


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
@pytest.mark.parametrize(
    ("name", "sampling", "adapters"),
    [
        ("llama", "works", "works"),
        pytest.param("gpt2", "works", "works", marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v4",
            "works, one sequence a line, prompts of one length",
            "works",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rwkv",
            "the self-test of the student failed: sampling two sequences",
            "works",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "xlstm",
            "the self-test of the student failed: sampling fails",
            "works",
            marks=pytest.mark.slow,
        ),
        pytest.param("phimoe", "works", "works", marks=pytest.mark.slow),
        ("mixtral", "works", "adapters do not work with"),
        pytest.param("mamba", "works, one sequence a line", "works", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "works, one sequence a line", "works", marks=pytest.mark.slow),
        pytest.param("jamba", "works, one sequence a line", "works", marks=pytest.mark.slow),
        pytest.param("phi3", "works", "works", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "works", "works", marks=pytest.mark.slow),
        # Rotary embeddings by type of layer, a linear layer of its own class, layers in stacks.
        pytest.param("gemma4_text", "works", "works", marks=pytest.mark.slow),
        ("lfm3", "works, one sequence a line", "works"),
        pytest.param("falcon", "works", "works", marks=pytest.mark.slow),
        pytest.param("bamba", "works, one sequence a line", "works", marks=pytest.mark.slow),
        pytest.param(
            "blt",
            "the self-test of the student failed: sampling fails",
            "works",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_student(name: str, sampling: str, adapters: str) -> None:
    outcome = examine(name)
    assert outcome.sampling.startswith(sampling)
    assert outcome.adapters.startswith(adapters)
    assert outcome.export == WORKS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_type_works_or_is_refused_as_the_page_says(name: str) -> None:
    outcome = examine_in_process(name)
    assert "off by" not in outcome.sampling + outcome.adapters + outcome.export
    assert "lacks" not in outcome.adapters + outcome.export
    rows = (line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines())
    (row,) = (cells for cells in rows if cells[0] == f"`{name}`")
    assert list_cells(outcome) == row


@pytest.mark.filterwarnings("default")
# The head of Bert has another layer before it, that of Dory a factor for each id.
@pytest.mark.parametrize("name", ["bert", pytest.param("dory", marks=pytest.mark.slow)])
def test_a_type_whose_head_is_not_linear(name: str) -> None:
    outcome = examine(name)
    assert outcome.teacher.startswith("the logits of the model are not one linear layer")
    assert outcome.student == SLOW


def test_the_page() -> None:
    outcomes = [
        Outcome(
            name,
            model,
            WORKS if number else "it | broke",
            WORKS if number else SLOW,
            f"{WORKS}, prompts of one length",
            *[WORKS if number else "it | broke"] * 2,
        )
        for number, (name, model) in enumerate(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    ]
    text = format_page(outcomes)
    assert f"| teacher | {len(outcomes) - 1} of {len(outcomes)} | 99% |" in text
    assert f"| sampling | {len(outcomes)} of {len(outcomes)} | 100% |" in text
    row = f"it / broke | {SLOW} | works, prompts of one length | it / broke | it / broke"
    assert f"| plain | {row} |" in text
