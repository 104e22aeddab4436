from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distill_server.dashboard.browser import Browser
from tests.distill_server.dashboard.site import Site


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**options: object) -> Site:
        sites.append(Site(tmp_path / "runs", **options))  # type: ignore[arg-type]
        return sites[-1]

    yield make
    for site in sites:
        site.clean_up()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server without tokens, as on a person's own machine."""
    site = Site(tmp_path_factory.mktemp("open") / "runs")
    yield site
    site.clean_up()


@pytest.fixture(scope="module")
def guarded_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("guarded") / "runs", tokens=True)
    yield site
    site.clean_up()


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def nothing_went_wrong(browser: Browser) -> Iterator[None]:
    """The console has no script errors or blocked requests, only responses with 400 and 401."""
    browser.resize(1280)
    browser.open("about:blank")  # the page of the test before may still ask a stopped server
    browser.complaints()
    yield
    refusals = ("(Unauthorized)", "(Bad Request)")
    assert [message for message in browser.complaints() if not message.endswith(refusals)] == []
