"""Features of the pages besides curves, in a real browser: compare, zoom, queue, search."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clients.jobs.plots.panels import smooth_curve
from protos.rpc.ports import free_ports
from tests.distill_server.conftest import job_config
from tests.distill_server.dashboard.browser import IN_BROWSER, Browser, eventually
from tests.distill_server.dashboard.proxy import PREFIX, proxy
from tests.distill_server.dashboard.site import TOKENS, Site

pytestmark = IN_BROWSER
CHART = ".curve:not([hidden]) .drawing"


def wait_until_succeeded(site: Site, *jobs: str) -> None:
    eventually(lambda: all(site.job(job)["state"] == "SUCCEEDED" for job in jobs))


def test_smoothing_is_that_of_the_reports(site: Site, browser: Browser) -> None:
    noise = random.Random(0)
    values = [noise.gauss(1.0, 0.5) for _ in range(333)]
    browser.open(f"{site.url}/#/")

    def smooth_in_page(call: str) -> list[float]:
        script = f"return import('/smoothing.js').then((smoothing) => smoothing.{call})"
        curve: list[float] = browser.run(script.replace("VALUES", json.dumps(values)))
        return curve

    report = [y for _, y in smooth_curve(list(enumerate(values)))]
    assert smooth_in_page("movingAverage(VALUES)") == pytest.approx(report, rel=1e-12)
    assert smooth_in_page("movingAverage(VALUES.slice(0, 59))") == values[:59]
    weighted = [
        sum(0.9 ** (n - i) * values[i] for i in range(n + 1)) / sum(0.9**i for i in range(n + 1))
        for n in range(len(values))
    ]
    assert smooth_in_page("exponential(VALUES, 0.9)") == pytest.approx(weighted, rel=1e-12)


def test_jobs_are_compared(site: Site, browser: Browser) -> None:
    first_job = site.submit(name="one", max_steps=20)
    second_job = site.submit(name="other tokens=7", max_steps=30)
    wait_until_succeeded(site, first_job, second_job)
    browser.open(f"{site.url}/#/")
    for job in (first_job, second_job):
        eventually(lambda job=job: browser.count(f"[data-job='{job}'] [type=checkbox]") == 1)
        browser.click(f"[data-job='{job}'] [type=checkbox]")
    assert browser.text(".selection b") == "2 selected"
    browser.click(".selection button")
    eventually(lambda: browser.count(".curve:not([hidden]) .legend i") == 2)
    assert browser.run("return location.hash") == f"#/compare/{first_job},{second_job}"
    # A chart of `loss` with a line of each job, and one of `tokens`, which only one job has.
    assert browser.text(".curve h3") == "Loss"
    assert browser.texts(".curve:not([hidden]) .legend li:not(.place)") == [
        f"one {1 / 20:.4g}",
        f"other tokens=7 {1 / 30:.4g}",
    ]
    browser.click("main details summary")
    eventually(lambda: browser.text("details .curve h3") == "tokens")
    label = browser.attribute(CHART, "aria-label")
    assert label == "Loss at step 30: one 0.05, other tokens=7 0.03333"
    browser.press(CHART, "END")
    # At the last step of the longer job, the shorter one has no value.
    assert browser.attribute(CHART, "aria-label").startswith("Loss at step 30: one -, other")
    rows = [
        browser.run("return [...arguments[0].children].map(c => c.textContent)", row)
        for row in browser.elements(".differences tbody tr")
    ]
    assert rows == differences(site.job(first_job)["config"], site.job(second_job)["config"])
    assert browser.run(
        "return import('/seeds.js').then(({flattened}) =>"
        " flattened({train: {rate: 1e-5, on: null}, list: [1, {a: 2}], deep: {a: {b: 'x'}}}))"
    ) == [
        ["train.rate", "0.00001"],
        ["list", '[1,{"a":2}]'],
        ["deep.a.b", '"x"'],
    ]


def test_seeds_are_grouped(site: Site, browser: Browser) -> None:
    """Jobs that differ by their seeds only; a job alone has no mean."""
    jobs = [
        site.submit(job_config(f"run tokens={tokens}", steps).model_copy(update={"seed": seed}))
        for tokens, steps, seed in ((7, 10, 1), (9, 10, 2), (5, 10, 3), (7, 20, 1))
    ]
    wait_until_succeeded(site, *jobs)
    browser.open(f"{site.url}/#/compare/{','.join(jobs)}")
    eventually(lambda: browser.texts(".seeds tbody:nth-of-type(1) td:nth-child(4)") == ["0.1"] * 3)
    assert browser.texts(".seeds .mean th") == ["mean of 3 seeds max_steps = 10"]
    assert browser.texts(".seeds .mean td") == ["0.1 \u00b1 0"]
    assert browser.count(".seeds tbody") == 2
    eventually(lambda: browser.count(".curve:not([hidden]) .legend i") == 4)


def test_the_interval_of_a_mean(site: Site, browser: Browser) -> None:
    """The quantiles of Student's t, by integration of its density."""
    browser.open(f"{site.url}/#/")
    values = np.random.default_rng(0).normal(0.3, 0.1, 50)
    script = "return import('/seeds.js').then(({interval}) => VALUES.map((_, n) => interval("
    script += "VALUES.slice(0, n + 1))))"
    nothing, *intervals = browser.run(script.replace("VALUES", json.dumps(values.tolist())))
    assert nothing is None
    for count, result in enumerate(intervals, 2):
        sample, freedom = values[:count], count - 1
        assert result["mean"] == pytest.approx(sample.mean())
        quantile = result["half"] / (sample.std(ddof=1) / math.sqrt(count))
        points = np.linspace(-quantile, quantile, 100_001)
        logs = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        density = math.exp(logs) / math.sqrt(freedom * math.pi)
        density *= (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
        assert np.trapezoid(density, points) == pytest.approx(0.95, abs=5e-5), count


def test_the_held_out_loss_is_the_metric_that_chooses_the_best_step(
    site: Site, browser: Browser
) -> None:
    browser.open(f"{site.url}/#/")
    metrics = {"eval/cross_entropy": 3, "eval/kl_bound": 2, "eval/kl": 1}
    for metric, value in metrics.copy().items():
        available = {name: number for name, number in metrics.items() if number >= value}
        script = "return import('/figures.js').then(({heldOutOf}) => heldOutOf(arguments[0]))"
        script = script.replace("arguments[0]", json.dumps(available))
        assert browser.run(script) == value, metric


def test_a_list_says_which_kl_a_job_has(site: Site, browser: Browser) -> None:
    """A fine-tuning job has no KL; its list entry shows the cross-entropy."""
    browser.open(f"{site.url}/#/")
    kinds = {
        "cross_entropy": "cross-entropy",
        "kl/anchor": "to the anchor",
        "kl/teacher_bound": "lower bound",
        "kl/teacher": "",
    }
    metrics: dict[str, int] = {}
    for number, (metric, kind) in enumerate(kinds.items()):
        metrics[metric] = number
        script = "return import('/figures.js').then((figures) => figures.klWithKind(METRICS))"
        assert browser.run(script.replace("METRICS", json.dumps(metrics))) == [number, kind]
    script = "return import('/figures.js').then(({klOf}) => [klOf({cross_entropy: 1}) ?? null])"
    assert browser.run(script) == [None]


def differences(first_config: dict[str, Any], second_config: dict[str, Any]) -> list[list[str]]:
    """Return the rows for two jobs whose configurations differ only at the top level."""
    keys = sorted(key for key in first_config if first_config[key] != second_config[key])
    assert all(not isinstance(first_config[key], dict) for key in keys)
    return [[key, json.dumps(first_config[key]), json.dumps(second_config[key])] for key in keys]


def test_the_x_axis_is_chosen_and_zoomed(site: Site, browser: Browser) -> None:
    job = site.submit(name="crash_at=14 crashes=1 every=10 tokens=7 pause=0.05", max_steps=40)
    wait_until_succeeded(site, job)
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: "step 40:" in browser.attribute(CHART, "aria-label"))
    browser.choose("[aria-label='Horizontal axis']", "tokens")
    # The second attempt repeats the steps after its checkpoint; they count once.
    assert browser.attribute(CHART, "aria-label").startswith(f"Loss at {7 * 40} tokens:")
    browser.press(CHART, "HOME")
    assert browser.text(".legend .place") == "7 tokens"
    browser.choose("[aria-label='Horizontal axis']", "times")
    ended_at, started_at = site.job(job)["ended_at"], site.job(job)["started_at"]
    seconds = int(re.findall(r"Loss at (\d+)s:", browser.attribute(CHART, "aria-label"))[0])
    assert 1.5 < ended_at - started_at - 1 <= seconds <= ended_at - started_at + 1
    browser.choose("[aria-label='Horizontal axis']", "steps")
    full_drawing = browser.drawing(CHART)
    browser.drag(CHART, 0.5, 0.9)
    eventually(lambda: browser.count(".chart-view button:not([hidden])") == 1)
    # Both ends of the range: the keys stay within it.
    browser.press(CHART, "HOME")
    first_step = int(browser.text(".legend .place").removeprefix("step ").partition(",")[0])
    browser.press(CHART, "END")
    last_step = int(browser.text(".legend .place").removeprefix("step ").partition(",")[0])
    assert 15 < first_step < last_step < 40
    assert browser.drawing(CHART) != full_drawing
    browser.double_click(CHART)
    eventually(lambda: browser.drawing(CHART) == full_drawing)
    browser.press(CHART, "END")
    browser.type(CHART, "+")
    assert browser.drawing(CHART) != full_drawing
    browser.click(".chart-view button")
    assert browser.drawing(CHART) == full_drawing
    assert browser.run("return document.activeElement.tagName") == "SELECT"


def test_the_queue_and_an_attempt_that_died(
    make_site: Callable[..., Site], browser: Browser
) -> None:
    site = make_site(slots=1)
    job = site.submit(
        name="crash_at=7 crashes=1 hang_at=20 every=2 best=8 pause=0.05", max_steps=99
    )
    eventually(lambda: site.job(job)["attempt"] == 2 and site.job(job)["step"] > 6)
    waiting = [site.submit(name=name, max_steps=1) for name in ("second", "third")]
    browser.open(f"{site.url}/#/")
    for place, name in enumerate(waiting, 1):
        text = f"queuedplace {place}: the only slot is in use"
        state = f"[data-job='{name}'] td:nth-child(2)"
        eventually(lambda state=state, text=text: browser.text(state) == text)
    assert browser.text(".capacity").startswith("In use: 1 of 1 slots, 1 of 1 CPU threads. In the")
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: browser.count(".attempts li") == 2)
    newest, oldest = browser.texts(".attempts li")
    assert newest.startswith("attempt 2 running waited ")
    assert oldest.startswith("attempt 1 interrupted waited ")
    assert " to step 6" in oldest
    assert "killed by signal 9" in oldest
    assert browser.count(".attempts li:last-child .span.interrupted .ran") == 1
    eventually(lambda: " of " in browser.text(".cards section:nth-of-type(2) .facts dd"))
    assert "MiB of" in browser.text(".cards section:nth-of-type(2)")
    browser.click(".checkpoints summary")
    eventually(lambda: browser.count(".checkpoints tbody tr") >= 6)
    assert browser.texts(".checkpoints tbody tr:last-child > *")[:3] == ["2", "-", "1000 B"]
    assert browser.texts(".checkpoints thead th")[1] == "eval/kl"
    assert browser.texts(".checkpoints .best > *")[:2] == ["10", "best: 2"]
    best_command = f"distill pull {job} --checkpoint best"
    assert browser.texts(".checkpoints .hint code")[1] == best_command
    find_in_the_log(browser)
    browser.click(".commands-view summary")
    commands = browser.texts(".commands code")
    assert f"distill watch {job} --server {site.address}" in commands
    assert [words.split()[1] for words in commands] == ["watch", "logs", "cancel"]
    browser.click(".commands button")
    eventually(lambda: browser.text(".commands button") in ("Copied", "Selected"))
    browser.open("about:blank")


def find_in_the_log(browser: Browser) -> None:
    """The log of the second attempt: a line, then `step N` for the steps 7 to 19."""
    browser.run("document.querySelector('.log').closest('details').open = true")
    eventually(lambda: "\nstep 19\n" in browser.text(".log"))
    browser.type(".find input", "STEP 1")
    eventually(lambda: " of " in browser.text(".find [role=status]"))
    assert browser.text(".find [role=status]") == "10 of 10"
    browser.press(".find input", "ENTER")
    assert browser.text(".find [role=status]") == "1 of 10"
    browser.click(".find button:nth-of-type(2)")
    assert browser.text(".find [role=status]") == "2 of 10"
    browser.click(".find button")
    offset = browser.run("return [...CSS.highlights.get('found-here')][0].startOffset")
    assert browser.text(".log").index("step 10\n") == offset
    browser.type(".find input", "(x")
    eventually(lambda: browser.text(".find [role=status]") == "no match in the lines shown")


def test_behind_a_proxy(make_site: Callable[..., Site], browser: Browser) -> None:
    """Under a prefix and another name: list, event stream and an action, from the browser."""
    (port,) = free_ports(1)
    with proxy(port) as proxy_port:
        # Chromium resolves every name below `localhost` to this machine.
        url = f"http://distill.localhost:{proxy_port}{PREFIX}"
        site = make_site(tokens=True, port=port, external=url)
        assert site.url == url
        job = site.submit(name="pause=0.1", max_steps=1000)
        browser.open(f"{url}/#/")
        eventually(lambda: browser.run("return document.querySelector('#token').open"))
        browser.give_token(TOKENS["submit"])
        eventually(lambda: browser.count(f"[data-job='{job}']") == 1)
        browser.click(f"[data-job='{job}'] a")
        eventually(lambda: browser.count(CHART) == 1)
        drawing_before = browser.drawing(CHART)
        eventually(lambda: browser.drawing(CHART) != drawing_before)
        browser.click(".actions .buttons button")
        browser.click(".actions dialog .strong")
        eventually(lambda: browser.text(".title .badge") == "cancelled")
        assert site.job(job, "read")["state"] == "CANCELLED"
        assert site.ask("/api/jobs", role="read", headers={"Host": "other.localhost"}).status == 403
        browser.open("about:blank")


def test_how_far_an_engine_is_ahead(site: Site, browser: Browser) -> None:
    job = site.submit(name="ahead lag=2", max_steps=8)
    wait_until_succeeded(site, job)
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: browser.texts(".curve:not([hidden]) h3") == ["Loss"])
    browser.click("details:has(> [data-theme=Training]) summary")
    titles = ["Loss", "Importance weights", "Sampler", "Staleness"]
    eventually(lambda: browser.texts(".curve:not([hidden]) h3") == titles)
    legends = browser.texts(".curve:not([hidden]) .legend li:not(.place)")
    assert legends[1:4] == ["share clipped or masked 0", "effective share of samples 0.9", "mean 1"]
    assert legends[4:] == ["KL 0.02", "lag 2"]
