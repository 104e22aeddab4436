"""Random data, templates, tokenizers and models: read rightly, or refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.data.fuzzing import __main__ as fuzzing
from tests.clients.data.fuzzing.__main__ import main
from tests.faults.conftest import REPEATS


def test_every_case_is_read_rightly_or_refused() -> None:
    """50 cases; `make test-all` has 2,000, and the rest of 10,000 below."""
    assert main(["--count", str(2000 if REPEATS >= 20 else 50)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_cases(part: int) -> None:
    assert main(["--first", str(2000 * (part + 1)), "--count", "2000"]) == 0


@pytest.mark.slow
def test_a_run_goes_on_after_its_last_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "CASES_PER_ENTRY", 20)
    state = tmp_path / "state.jsonl"
    arguments = ["--seed", "5", "--state", str(state)]
    assert main([*arguments, "--count", "40"]) == 0
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = state.read_text().splitlines(keepends=True)
    state.write_text(lines[0])  # killed in the second twenty
    assert main([*arguments, "--count", "40"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == whole
