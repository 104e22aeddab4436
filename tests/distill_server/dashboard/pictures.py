"""The pictures of docs/dashboard.md, taken of a running server: URL JOB [TOKEN]."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.distill_server.dashboard.browser import Browser

FOLDER = Path(__file__).parents[3] / "docs" / "dashboard"
# A second look at the teachers gives their tokens a second.
LOOKS = {"jobs": ("#/", 2.0), "job": ("#/jobs/{job}", 4.0), "teachers": ("#/teachers", 6.0)}
PICTURES = (
    ("jobs-light", 1100, False),
    ("job-light", 1100, False),
    ("jobs-dark", 1100, True),
    ("job-dark", 1100, True),
    ("jobs-narrow", 400, False),
    ("job-narrow", 400, False),
    ("teachers-light", 1100, False),
)


def take(name: str, url: str, job: str, token: str, *, width: int, dark: bool) -> None:
    page, seconds = LOOKS[name.partition("-")[0]]
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), dark=dark) as browser:
        browser.resize(width, 500)
        browser.open(f"{url}/{page.format(job=job)}")
        time.sleep(1.0)
        if browser.run("return document.querySelector('#token').open"):
            browser.give_token(token)
        time.sleep(seconds)
        if dark:
            browser.run("document.querySelectorAll('details')[1]?.setAttribute('open', '')")
            time.sleep(1.0)
        browser.picture(FOLDER / f"{name}.png")


def main(url: str, job: str, token: str = "") -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, width, dark in PICTURES:
        take(name, url, job, token, width=width, dark=dark)


if __name__ == "__main__":
    main(*sys.argv[1:])
