"""Rules for the static files of the pages, which no linter checks."""

from __future__ import annotations

import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from clients.jobs.plots.stages import STAGES, WITHOUT_ANSWERS
from distill_server.dashboard.gate import STATIC

FILES = sorted(path for path in STATIC.iterdir() if path.is_file())
# uPlot 1.6.32 as published on npm.
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
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
    assert re.findall(r"<script[^>]*>", page) == [
        '<script defer src="uplot/uPlot.iife.min.js">',
        '<script type="module" src="main.js">',
    ]
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)


def test_uplot_is_the_published_one_with_its_licence() -> None:
    """The policy of the pages holds for the library too: no code parses markup."""
    folder = STATIC / "uplot"
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }
    assert digests == UPLOT
    assert not PARSES_MARKUP.search((folder / "uPlot.iife.min.js").read_text())
    project = tomllib.loads((STATIC.parents[2] / "pyproject.toml").read_text())["project"]
    assert str((folder / "LICENSE").relative_to(STATIC.parents[2])) in project["license-files"]


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
