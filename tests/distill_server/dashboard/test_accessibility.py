"""Every page for everybody: axe-core in light, dark and on a phone, and tasks without a mouse.

axe-core is an npm package (`npm install axe-core` in any directory). $DISTILL_AXE names its file
axe.min.js; without it, the file is looked up in node_modules of this repository.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distill_server.dashboard.browser import IN_BROWSER, Browser, eventually
from tests.distill_server.dashboard.site import ROOT, TOKENS

pytestmark = [*IN_BROWSER, pytest.mark.slow]
AXE = Path(os.environ.get("DISTILL_AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
# The address and an element that is there when the page is complete.
PAGES = {
    "jobs": ("#/", ".jobs tbody tr"),
    "job that runs": ("#/jobs/on-policy-math-online", ".pipeline, .curve:not([hidden])"),
    "job that failed": ("#/jobs/offline-rank-student", "details[open] .log"),
    "job with a preview": ("#/jobs/sft-notes-sft", ".preview"),
    "sweep": ("#/table?search=sweep%3Dmath-lr", ".parallel"),
    "compare": ("#/compare/on-policy-lr-3e-5-seed-2,on-policy-lr-1e-4-seed-2", ".plain tbody tr"),
    "teachers": ("#/teachers", ".card .facts"),
    "machine": ("#/machine", ".meters"),
}
LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False)}
VIOLATIONS = """
return axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
  .filter(({impact}) => impact === "serious" || impact === "critical")
  .map(({id, nodes}) => [id, ...nodes.slice(0, 3).map(({html}) => html.slice(0, 99))].join(" | ")));
"""


@pytest.fixture(scope="module")
def seeded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the jobs of seeded_site.py."""
    program = "tests.distill_server.dashboard.seeded_site"
    runs = tmp_path_factory.mktemp("seeded") / "runs"
    with subprocess.Popen(
        [sys.executable, "-m", program, str(runs)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the port of gRPC
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)


def open_page(browser: Browser, url: str, page: str, ready: str) -> None:
    browser.open(f"{url}/{page}")
    eventually(
        lambda: browser.count(ready) or browser.run("return document.querySelector('#token').open")
    )
    if not browser.count(ready):
        browser.give_token(TOKENS["submit"])
    eventually(lambda: browser.count(ready) > 0)


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install axe-core, $DISTILL_AXE")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("page", PAGES)
def test_no_serious_violation(browser: Browser, seeded_url: str, page: str, look: str) -> None:
    width, dark = LOOKS[look]
    browser.prefer(dark=dark)
    browser.resize(width)
    try:
        open_page(browser, seeded_url, *PAGES[page])
        browser.run("document.querySelectorAll('main details').forEach((part) => part.open = true)")
        browser.run(AXE.read_text())
        assert browser.run(VIOLATIONS) == []
        if page == "jobs":
            browser.click(".jobs tbody [type=checkbox]")
            browser.run("[...document.querySelectorAll('.selection button')].at(-3).click()")
            assert browser.run(VIOLATIONS) == []
    finally:
        browser.prefer(dark=False)
        browser.open("about:blank")


def move_to(browser: Browser, selector: str) -> None:
    """Press the tab key until an element that matches has the focus."""
    for _ in range(80):
        if browser.run("return document.activeElement.matches(arguments[0])", selector):
            return
        browser.tab()
    raise AssertionError(f"the tab key does not reach {selector}")


def test_tasks_without_a_mouse(browser: Browser, seeded_url: str) -> None:
    """Finds the winner of a sweep, why a pipeline stopped, and a checkpoint; cancels a job."""
    open_page(browser, seeded_url, "#/", ".jobs tbody tr")
    move_to(browser, "[type=search]")
    browser.send("sweep=math-lr")
    eventually(lambda: browser.count(".jobs tbody tr") == 9)
    browser.run("document.querySelector('main').focus()")
    move_to(browser, ".results-link")
    browser.send("ENTER")
    eventually(lambda: browser.count(".best a") > 0)
    move_to(browser, "tr.best a")
    assert browser.run("return document.activeElement.textContent") == "lr-3e-5-seed-2"
    open_page(browser, seeded_url, "#/?state=FAILED", ".jobs tbody tr")
    move_to(browser, ".jobs tbody a")
    browser.send("ENTER")
    eventually(lambda: "CUDA out of memory" in browser.text(".reason"))
    move_to(browser, ".pipeline a[href*=exam]")
    browser.send("ENTER")
    eventually(lambda: "which must succeed first" in browser.text(".reason"))
    open_page(browser, seeded_url, "#/jobs/sft-notes-sft", ".preview")
    assert "best 0.4067 at step 300" in browser.text(".verdict")
    move_to(browser, "summary:has(+ .checkpoints-list), .checkpoints summary")
    browser.send("ENTER")
    eventually(lambda: browser.count(".checkpoints tbody tr") == 5)
    open_page(browser, seeded_url, "#/?search=math-rl", ".jobs tbody tr")
    move_to(browser, ".jobs tbody [type=checkbox]")
    browser.send("SPACE")
    browser.run("document.querySelector('.selection').querySelector('button').focus()")
    move_to(browser, ".selection .danger")
    browser.send("ENTER")
    eventually(lambda: browser.count("dialog[open]") == 1)
    assert browser.run("return document.activeElement.closest('dialog') !== null")
    browser.send("ENTER")
    eventually(lambda: "1 of 1 job cancelled" in browser.text(".outcome"))
    browser.open("about:blank")
