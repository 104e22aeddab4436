"""The pages of docs/ that benchmarks write equal the pages of the stored results."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from benchmarks.models import step_time_page
from benchmarks.offline import page as offline_page
from benchmarks.rl import page as rl_page
from tests.documents import ROOT

PAGES = [("offline", offline_page), ("rl", rl_page), ("step_time", step_time_page)]


@pytest.mark.parametrize(("name", "module"), PAGES)
def test_the_page_is_what_its_figures_say(name: str, module: ModuleType) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    page = name.replace("_", "-")
    assert (ROOT / "docs" / f"{page}.md").read_text() == module.format_page(result)
