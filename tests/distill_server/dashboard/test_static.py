"""Rules for the static files of the pages, which no linter checks."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from clients.jobs.plots.stages import STAGES, WITHOUT_ANSWERS
from distill_server.dashboard.gate import STATIC

FILES = sorted(STATIC.iterdir())
MAX_LINES = 250
# An XML namespace, not an address.
SVG = "http://www.w3.org/2000/svg"
PARSES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
    r"|srcdoc|\beval\(|new Function|javascript:"
)
LEAKS_A_TOKEN = re.compile(r"document\.cookie|localStorage|[?&]token=")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    assert len(text.splitlines()) <= MAX_LINES
    assert all(len(line) <= 120 for line in text.splitlines()) or path.suffix == ".svg"
    assert not PARSES_MARKUP.search(text)
    assert not LEAKS_A_TOKEN.search(text)
    # Works offline: no resource from another site.
    assert not re.search(r"https?:|url\(|@import|[\"'`]//", text.replace(SVG, ""))


def test_the_page_holds_no_script_or_style_of_its_own() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="main.js">']
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)


def test_every_module_that_is_imported_is_there() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        imported = re.findall(r'^import .* from "\./(.+)";$', path.read_text(), re.MULTILINE)
        assert set(imported) <= names, path.name


def test_the_stages_of_a_step_are_those_of_the_report() -> None:
    text = (STATIC / "stages_view.js").read_text()
    stage_labels = re.findall(r'{label: "(.+)", metric: (?:"(.+)"|null), colour: (\d)}', text)
    assert [(stage.label, stage.metric, str(stage.color)) for stage in STAGES] == stage_labels
    assert f'const WITHOUT_ANSWERS = "{WITHOUT_ANSWERS}";' in text
    report = files("clients.html").joinpath("report.css").read_text()
    page = (STATIC / "style.css").read_text()
    for stage in STAGES:
        colours = re.findall(rf"--c{stage.color}: (#\w+)", report)
        assert colours == re.findall(rf"--line-{stage.color}: (#\w+)", page)
        assert len(colours) == 2, "light and dark"
