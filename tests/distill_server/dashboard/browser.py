"""A wrapper of Chromium for the tests. Selenium is imported when a browser is created."""

from __future__ import annotations

import base64
import shutil
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.distill_server.conftest import eventually as patient

# Each check calls the browser, which costs more than the pause.
eventually = partial(patient, pause=0.1)
IN_BROWSER = [
    pytest.mark.skipif(
        shutil.which("chromium") is None or shutil.which("chromedriver") is None,
        reason="needs Debian's chromium and chromium-driver",
    ),
    pytest.mark.usefixtures("nothing_went_wrong"),
]

# Headless, and without background network requests.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """A browser with one window. `profile`: an empty directory."""

    def __init__(self, profile: Path, *, dark: bool = False) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--hide-scrollbars"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService("/usr/bin/chromedriver")
        self._driver = webdriver.Chrome(options=options, service=service)
        self.prefer(dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._driver.quit()

    def prefer(self, *, dark: bool) -> None:
        """Set the colour scheme of the system."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        """Load the page anew; a change of the hash alone would not load it."""
        self._driver.get("about:blank")
        self._driver.get(url)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str, *arguments: object) -> Any:
        return self._driver.execute_script(script, *arguments)

    def count(self, selector: str) -> int:
        count: int = self.run("return document.querySelectorAll(arguments[0]).length", selector)
        return count

    def text(self, selector: str) -> str:
        """Return the text of the first match; "" if there is none."""
        text = self.run("return document.querySelector(arguments[0])?.textContent", selector)
        return str(text or "")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all matches, in page order."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        texts: list[str] = self.run(script, selector)
        return texts

    def elements(self, selector: str) -> list[Any]:
        elements: list[Any] = self.run(
            "return [...document.querySelectorAll(arguments[0])]", selector
        )
        return elements

    def attribute(self, selector: str, name: str) -> str:
        script = "return document.querySelector(arguments[0])?.getAttribute(arguments[1])"
        return str(self.run(script, selector, name) or "")

    def drawing(self, selector: str) -> str:
        """Return the pixels of the first canvas in an element, as a data URL."""
        script = "return document.querySelector(arguments[0]).querySelector('canvas').toDataURL()"
        return str(self.run(script, selector))

    def click(self, selector: str) -> None:
        self._driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        self._driver.find_element("css selector", selector).send_keys(text)

    def clear(self, selector: str) -> None:
        self._driver.find_element("css selector", selector).clear()
        self.run("document.querySelector(arguments[0]).dispatchEvent(new Event('input'))", selector)

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag across an element; `begin` and `end` are fractions of its width."""
        from selenium.webdriver.common.action_chains import ActionChains

        element = self._driver.find_element("css selector", selector)
        width = element.rect["width"]
        offsets = [round((share - 0.5) * width) for share in (begin, end)]
        actions = ActionChains(self._driver, duration=20).move_to_element_with_offset(
            element, offsets[0], 0
        )
        actions.click_and_hold().move_by_offset(offsets[1] - offsets[0], 0).release().perform()

    def double_click(self, selector: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        element = self._driver.find_element("css selector", selector)
        ActionChains(self._driver, duration=20).double_click(element).perform()

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self._driver.find_element("css selector", selector)).select_by_value(value)

    def send(self, *keys: str) -> None:
        """Press keys for the focused element; names as in selenium's Keys, else text."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self._driver).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()

    def tab(self) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self._driver).send_keys(Keys.TAB).perform()

    def press(self, selector: str, key: str) -> None:
        """Press a key, named as in selenium's Keys: `HOME`."""
        from selenium.webdriver.common.keys import Keys

        self.type(selector, getattr(Keys, key))

    def give_token(self, token: str) -> None:
        self.type("#token-field", token)
        self.click("#token .strong")

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def picture(self, path: Path, max_height: int = 100_000) -> None:
        """Save a screenshot of the page, up to `max_height` pixels from its top."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(max_height, height), "scale": 1}
        parameters = {"captureBeyondViewport": True, "clip": clip}
        screenshot = self._command("Page.captureScreenshot", parameters)
        path.write_bytes(base64.b64decode(screenshot["data"]))

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._driver.execute_cdp_cmd(name, parameters)
