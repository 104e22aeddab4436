"""Cases by number: each is read rightly, or refused in one way, with a field and a remedy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from protos.errors import InvalidInput
from tests.clients.data.fuzzing.data_cases import (
    DataCase,
    Item,
    expect_items,
    make_data_case,
    read_items,
)
from tests.clients.data.fuzzing.directory_cases import (
    require_remedy,
    run_model_case,
    run_tokenizer_case,
)
from tests.clients.data.fuzzing.job_cases import run_job_case
from tests.clients.data.fuzzing.renderer import Refusal
from tests.clients.data.fuzzing.tokenizer_files import make_backend

# One case of so many is a whole job, which takes a second.
JOB_INTERVAL = 250


def run_case(seed: int, number: int) -> str:
    """Run one case, and return what has become of it, such as "data: refused".

    Raises AssertionError if it is read wrongly, if right data are refused or wrong data read, and
    any other error that the product raises.
    """
    random = Random(f"{seed} {number}")
    with TemporaryDirectory() as folder:
        kind = random.random()
        if number % JOB_INTERVAL == 0:
            return f"job: {run_job_case(random, Path(folder))}"
        if kind < 0.1:
            return f"tokenizer: {run_tokenizer_case(random, Path(folder))}"
        if kind < 0.2:
            return f"model: {run_model_case(random, Path(folder))}"
        return f"data: {_run_data_case(random, Path(folder))}"


def _run_data_case(random: Random, folder: Path) -> str:
    case = make_data_case(random)
    try:
        expected = expect_items(case)
        reason = ""
    except Refusal as refusal:
        expected, reason = [], str(refusal)
    try:
        items = read_items(case, folder)
    except InvalidInput as error:
        require_remedy(error)
        if not reason:
            raise AssertionError(f"refuses {case}: {error}") from error
        return f"refused, {reason}"
    assert not reason, f"reads what has a fault ({reason}): {case}"
    extra, missing = Counter(items) - Counter(expected), Counter(expected) - Counter(items)
    if extra or missing:
        shown = [[_describe(case, item) for item in difference] for difference in (extra, missing)]
        raise AssertionError(f"reads {shown[0]} in place of {shown[1]}: {case}")
    return "read"


def _describe(case: DataCase, item: Item) -> tuple[str, str, object]:
    """Return the text of an item, its learned tokens as digits, and its value."""
    ids, learned, value = item
    text = make_backend(case.kind).decode(list(ids), skip_special_tokens=False)
    return text, "".join("01"[flag] for flag in learned), value
