"""Takes the pictures of docs/dashboard.md from a server: URL TOKEN JOB OTHER_JOB [FOLDER].

JOB is shown on its page, and compared with OTHER_JOB. Without tokens, TOKEN is "".
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tests.distill_server.dashboard.browser import Browser

FOLDER = Path(__file__).parents[3] / "docs" / "dashboard"
# The pages of teachers and jobs compute speeds from two measurements.
LOOKS = {
    "jobs": ("#/", 2.0),
    "job": ("#/jobs/{0}", 8.0),
    "compare": ("#/compare/{0},{1}", 4.0),
    "teachers": ("#/teachers", 6.0),
}
# Keeps small spots of another colour, which the default quantizer merges.
FEW_COLOURS = Image.Quantize.FASTOCTREE
# Maximum heights in pixels; the rest of the page repeats itself.
TALLEST = {"compare": 1560}
# Width in pixels, and whether the system is in dark mode.
KINDS = {"light": (1100, False), "dark": (1100, True), "narrow": (390, False)}
# Opens some sections of a job's page, so that one picture shows them.
OPEN = "document.querySelectorAll('details:has(.checkpoints-list, .log, .commands)')"


def take(path: Path, url: str, token: str, jobs: Sequence[str]) -> None:
    name, _, kind = path.stem.partition("-")
    page, seconds = LOOKS[name]
    width, dark = KINDS[kind]
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), dark=dark) as browser:
        browser.resize(width, 500)
        browser.open(f"{url}/{page.format(*jobs)}")
        time.sleep(1.0)
        if browser.run("return document.querySelector('#token').open"):
            browser.give_token(token)
        time.sleep(seconds)
        if dark:
            browser.run(f"{OPEN}.forEach(section => section.open = true)")
            time.sleep(2.0)
            browser.run("document.querySelectorAll('.find input').forEach(f => f.value = 'step')")
            browser.run(
                "document.querySelectorAll('.find input')"
                ".forEach(f => f.dispatchEvent(new Event('input')))"
            )
            time.sleep(1.0)
        browser.picture(path, max_height=TALLEST.get(name, 10_000))
    # A page of flat colours needs only a palette.
    Image.open(path).convert("RGB").quantize(method=FEW_COLOURS).save(path, optimize=True)


def main(url: str, token: str, job: str, other_job: str, folder: str = str(FOLDER)) -> None:
    Path(folder).mkdir(exist_ok=True)
    for name in LOOKS:
        for kind in KINDS if name != "teachers" else ("light",):
            take(Path(folder) / f"{name}-{kind}.png", url, token, (job, other_job))


if __name__ == "__main__":
    main(*sys.argv[1:])
