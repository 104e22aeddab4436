"""The pages in a real browser: Debian's chromium, headless."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob, OnPolicyTeacher
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.data.preview import Preview, RecordPreview, TokenRun, TokenView
from clients.jobs.client import DistillClient
from tests.distill_server.dashboard.browser import IN_BROWSER, Browser, eventually
from tests.distill_server.dashboard.site import TOKENS, Site

pytestmark = IN_BROWSER
CHART = ".curve:not([hidden]) .drawing"
# An open alert fails any test.
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> pause=0.1"


def test_a_curve_grows_while_its_job_runs(site: Site, browser: Browser) -> None:
    job = site.submit(name="pause=0.1", max_steps=1000)
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: browser.count(".curve:not([hidden]) canvas") == 1)

    def last_step() -> int:
        label = browser.attribute(CHART, "aria-label")
        return int(label.split(" at step ")[1].partition(":")[0])

    first_step = last_step()
    drawing_before = browser.drawing(CHART)
    eventually(lambda: last_step() >= first_step + 5)
    assert browser.drawing(CHART) != drawing_before
    assert "running" in browser.text(".title")
    assert f"of {1000}" in browser.text(".progress")


def test_the_list_is_live_and_searched(site: Site, browser: Browser) -> None:
    browser.open(f"{site.url}/#/")
    eventually(lambda: browser.count(".filters button") > 0)
    job = site.submit(name="pause=0.1 wanted", max_steps=400)
    row = f"[data-job='{job}']"
    eventually(lambda: browser.count(row) == 1)
    browser.type("[type=search]", "WANTED running")
    eventually(lambda: browser.count(".jobs tbody tr") == 1 == browser.count(row))
    step_text = browser.text(f"{row} td:nth-child(3)")
    eventually(lambda: browser.text(f"{row} td:nth-child(3)") != step_text)
    remaining_cell = f"{row} td:nth-child(6)"
    eventually(lambda: browser.text(remaining_cell).endswith("s left"))
    assert browser.run("return location.hash") == "#/?search=WANTED+running"
    assert browser.run("return document.activeElement.type") == "search", "typing goes on"
    browser.type("[type=search]", " nothing")
    eventually(lambda: "No job has all of these words" in browser.text(".notice"))
    browser.clear("[type=search]")
    eventually(lambda: browser.count(row) == 1)


def test_an_address_with_a_broken_escape(site: Site, browser: Browser) -> None:
    browser.open(f"{site.url}/#/jobs/%zz")
    eventually(lambda: "no job '%zz'" in browser.text(".notice"))
    browser.complaints()  # the response 404


@pytest.mark.parametrize("page", ["#/", "#/jobs/{job}", "#/compare/{job}"])
def test_who_has_the_focus_is_seen(site: Site, browser: Browser, page: str) -> None:
    """Every element that the tab key reaches has a visible focus outline."""
    job = site.submit(name="pause=0", max_steps=5)
    eventually(lambda: site.job(job)["state"] == "SUCCEEDED")
    browser.open(f"{site.url}/{page.format(job=job)}")
    eventually(lambda: browser.count("main *") > 3)
    focused = set()
    for _ in range(12):
        browser.tab()
        name, style, width = browser.run(
            "const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.outerHTML.slice(0, 60), s.outlineStyle, parseFloat(s.outlineWidth)]"
        )
        if name.startswith("<body"):
            break
        focused.add(name)
        assert (style, width >= 2) == ("solid", True), name
    assert len(focused) >= 3


def test_the_keys_read_a_curve(site: Site, browser: Browser) -> None:
    job = site.submit(name="pause=0", max_steps=20)
    eventually(lambda: site.job(job)["state"] == "SUCCEEDED")
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: "step 20" in browser.attribute(CHART, "aria-label"))
    browser.press(CHART, "HOME")
    label = browser.attribute(CHART, "aria-label")
    assert label == "Loss at step 1: loss 1"
    browser.press(CHART, "ARROW_RIGHT")
    assert browser.text(".legend .place") == "step 2"
    assert browser.text(".legend b") == "0.5"


def test_a_hostile_name_is_text(site: Site, browser: Browser) -> None:
    job = site.submit(name=HOSTILE, max_steps=300)
    eventually(lambda: site.job(job)["step"] >= 1)
    samples = site.runs / job / "samples"
    samples.mkdir()
    sample = {"<b>prompt</b>": "<script>window.hit=1</script>", "turns": [{"x": "</dd><script>"}]}
    (samples / "step-000001.jsonl").write_text(json.dumps(sample) + "\n")
    text = "<script>window.hit=1</script>\n"
    view = TokenView("student", 9, 4, (TokenRun("learned", (text, "</bdi>")),))
    record = RecordPreview(text, f"left out: {text}", (view,), ((text, text),))
    preview = Preview("sft", (text,), ((text, text),), (record,))
    (site.runs / job / "preview.json").write_text(preview.to_json())
    with (site.runs / job / "logs" / "attempt-1" / "rank-0.log").open("a") as log:
        log.write("<script>window.hit=1</script>\n")
    browser.open(f"{site.url}/#/")
    eventually(lambda: HOSTILE in browser.text(".jobs"))
    browser.open(f"{site.url}/#/jobs/{job}")
    eventually(lambda: browser.text("h1") == HOSTILE)
    browser.run("document.querySelectorAll('main details').forEach(d => d.open = true)")
    eventually(lambda: "</dd><script>" in browser.text(".samples"))
    eventually(lambda: "window.hit=1</script>\n" in browser.text(".log"))
    learned = [text.replace("\n", "\\n\n"), "</bdi>"]
    eventually(lambda: browser.texts(".preview bdi.learned") == learned)
    compare = "document.querySelector('.preview').compareDocumentPosition"
    above = f"return {compare}(document.querySelector('h2'))"
    assert browser.run(above) & 4, "the preview comes first"
    assert HOSTILE in browser.text(".config")
    assert browser.run("return [window.hit ?? null, document.scripts.length]") == [None, 2]
    # Trusted Types: the browser refuses innerHTML even from our own scripts.
    assert browser.run(
        "try { document.body.innerHTML = '<b>x</b>'; return 'done'; } catch (e) { return e.name; }"
    ) == ("TypeError")
    browser.complaints()


def test_held_out_tokens_are_coloured(site: Site, browser: Browser) -> None:
    job = site.submit(name="pause=0", max_steps=2)
    eventually(lambda: site.job(job)["state"] == "SUCCEEDED")
    folder = site.runs / job / "token_logprobs"
    folder.mkdir()
    tokens = ["<b>", "4\n", "2"]
    record = {"prompt": "6*7=", "tokens": tokens, "student": [-0.01, -3.0, -5.0]}
    for step, teacher in ((0, [None, -0.5, -0.1]), (2, [-0.03, -3.0, -0.2])):
        text = json.dumps(record | {"teacher": teacher})
        sequences = 1 if step else 2
        (folder / f"step-{step:06d}.jsonl").write_text(f"{text}\n" * sequences)
    browser.open(f"{site.url}/#/jobs/{job}")
    section = "details:has([aria-label='Step of Tokens'])"
    eventually(lambda: browser.count(f"{section} > summary") == 1)
    browser.click(f"{section} > summary")
    shown = f"{section} article bdi"
    eventually(lambda: browser.texts(shown) == ["<b>", "4\\n\n", "2"])

    def list_classes() -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.className)"
        classes: list[str] = browser.run(script, shown)
        return classes

    assert list_classes() == ["token gap-2", "token gap-2", "token gap-4"]
    title = browser.attribute(f"{shown}:last-child", "title")
    assert title == "student: 0.00674 (log-prob -5), teacher: 0.819 (log-prob -0.2)"
    browser.choose(f"{section} [aria-label='Step of Tokens']", "0")
    eventually(lambda: list_classes() == ["token gap-0", "token gap-4", "token gap-4"] * 2)
    title = browser.attribute(f"{shown}:first-child", "title")
    assert title == "student: 0.99 (log-prob -0.01), teacher: 0 (log-prob -)", "an excluded token"
    samples = "details:has([aria-label='Step of Samples'])"
    browser.click(f"{samples} > summary")
    reason = "This job has no transcripts: it had no evaluation."
    eventually(lambda: browser.text(f"{samples} .hint") == reason)
    browser.choose("[aria-label='Colour of the tokens']", "student")
    assert list_classes() == ["token likely-0", "token likely-3", "token likely-4"] * 2


def test_the_table_of_an_evaluation(site: Site, browser: Browser) -> None:
    browser.open(f"{site.url}/#/")
    share = {"mean": 0.5, "low": 0.425, "high": 0.58}
    student = {"model": "student", "prompts": 80, "samples": 4, "truncated": 0.1, "errors": 0}
    student |= {"pass@1": share, "pass@4": share | {"mean": 0.75}, "maj@4": share}
    student["tokens"] = {"mean": 91.5, "low": 80.0, "high": 103.0}
    models = [student, student | {"model": "anchor", "gain": share | {"mean": 0.05}}]
    rows = browser.run(
        "return import('/evaluation_view.js').then(({EvaluationView}) => {"
        "  const view = new EvaluationView('');"
        f"  view.show({json.dumps(models)});"
        "  const textOf = (row) => [...row.children].map((cell) => cell.textContent);"
        "  return [...view.element.querySelectorAll('tr')].map(textOf); })"
    )
    assert rows[0] == [
        *("Model", "pass@1", "pass@4", "maj@4", "gain", "tokens", "cut answers", "errors")
    ]
    assert rows[1][:3] == ["student", "50.0% 42.5% to 58.0%", "75.0% 42.5% to 58.0%"]
    assert rows[1][4:] == ["-", "91.5 80 to 103", "10%", "0"]
    assert rows[2][4] == "+5.0% +42.5% to +58.0%"


def test_cancel_and_resume_with_a_token_only(guarded_site: Site, browser: Browser) -> None:
    job = guarded_site.submit(name="pause=0.1", max_steps=1000)
    browser.open(f"{guarded_site.url}/#/jobs/{job}")
    eventually(lambda: browser.run("return document.querySelector('#token').open"))
    assert job not in browser.text("body")
    assert "does not accept" not in browser.text("#token-why")
    browser.give_token("wrong" * 9)
    eventually(lambda: "does not accept this token" in browser.text("#token-why"))
    assert "does not accept this token" in browser.text(".notice")
    browser.give_token(TOKENS["read"])
    eventually(lambda: browser.count(".title .badge") == 1)
    assert browser.text("#access") == "token: read"
    assert browser.count(".actions") == 0
    browser.click("#access")
    browser.give_token(TOKENS["submit"])
    eventually(
        lambda: browser.count(".actions .danger") > 0 and guarded_site.job(job, "read")["step"]
    )
    browser.click(".actions .buttons button")
    browser.click(".actions dialog .strong")
    eventually(lambda: browser.text(".title .badge") == "cancelled")
    assert guarded_site.job(job, "read")["state"] == "CANCELLED"
    browser.click(".actions .buttons button")
    browser.type("#resume-steps", "1")
    browser.click(".actions dialog .strong")
    eventually(lambda: "already made" in browser.text(".actions .fault"))
    browser.click(".actions .buttons button")
    browser.click(".actions dialog .strong")
    eventually(lambda: browser.text(".title .badge") == "running")
    assert guarded_site.job(job, "read")["attempt"] == 2
    assert browser.run("return [document.cookie, location.search]") == ["", ""]


def test_selected_jobs_are_pinned_cancelled_and_removed(
    guarded_site: Site, browser: Browser
) -> None:
    ended, running, pinned = (
        guarded_site.submit(name=f"{words} bulk", max_steps=steps)
        for words, steps in (("pause=0", 1), ("pause=0.1", 1000), ("pause=0 pinned", 1))
    )
    for job in (ended, pinned):
        eventually(lambda job=job: guarded_site.job(job, "read")["state"] == "SUCCEEDED")
    browser.open(guarded_site.url)
    browser.run(f"sessionStorage.setItem('distill-token', '{TOKENS['submit']}')")
    browser.open(f"{guarded_site.url}/#/?search=bulk")
    eventually(lambda: browser.count(".jobs tbody tr") == 3)
    assert browser.count(".selection:not([hidden])") == 0

    def press(label: str) -> None:
        [button] = [
            button
            for button in browser.elements(".selection button, dialog[open] button")
            if button.text == label
        ]
        button.click()

    browser.click(f"[data-job='{pinned}'] [type=checkbox]")
    press("Pin")
    eventually(lambda: guarded_site.job(pinned, "read")["pinned"])
    eventually(lambda: browser.count(f"[data-job='{pinned}'] .pinned:not([hidden])") == 1)
    browser.click("thead [type=checkbox]")
    assert browser.text(".selection b") == "3 selected"
    eventually(lambda: guarded_site.job(running, "read")["step"])
    press("Cancel ...")
    press("Cancel without checkpoints")
    eventually(lambda: "1 of 3 jobs cancelled" in browser.text(".outcome"))
    assert f"job {ended} has already succeeded" in browser.text(".outcome"), "told at the end"
    eventually(lambda: guarded_site.job(running, "read")["state"] == "CANCELLED")
    press("Remove ...")
    press("Close")
    assert guarded_site.ask(f"/api/jobs/{ended}", role="read").status == 200
    press("Remove ...")
    press("Remove 3 jobs")
    eventually(lambda: "2 of 3 jobs removed" in browser.text(".outcome"))
    assert f"distill pin --off {pinned}" in browser.text(".outcome")
    eventually(lambda: browser.count(".jobs tbody tr") == 1)
    assert browser.text(".selection b") == "1 selected"
    assert guarded_site.ask(f"/api/jobs/{ended}", role="read").status == 404
    audit = (guarded_site.runs / "audit.jsonl").read_text()
    assert {"RemoveJob", "PinJob"} <= {json.loads(line)["action"] for line in audit.splitlines()}
    browser.run("sessionStorage.clear()")
    browser.complaints()  # the refused requests


def test_who_holds_the_machine_and_who_waits(
    make_site: Callable[..., Site], browser: Browser
) -> None:
    site = make_site(slots=1)
    running = site.submit(name="pause=0.1", max_steps=1000)
    queued = site.submit(name="pause=0.1 second", max_steps=1)
    browser.open(f"{site.url}/#/machine")
    eventually(lambda: browser.texts("[aria-label=Queue] tbody td:first-child") == ["1"])
    assert browser.texts("[aria-label=Queue] td")[2] == "the only slot is in use"
    assert browser.texts("[aria-label=Queue] td")[4].endswith(" ago")
    assert browser.texts(".meters span")[0] == "1 of 1 slots"
    links = browser.run("return [...document.querySelectorAll('main a')].map((a) => a.hash)")
    assert links == [f"#/jobs/{running}", f"#/jobs/{queued}"]
    assert browser.texts("[aria-label='In use'] td")[1] == "-", "no GPU"
    names = browser.run(
        "return import('/figures.js').then(({gpuNames}) => ["
        "gpuNames(['0']), gpuNames(['0', '1']), gpuNames([])])"
    )
    assert names == ["GPU 0", "GPUs 0, 1", "-"]
    browser.open("about:blank")


def test_nothing_sticks_out_at_400_pixels(site: Site, browser: Browser) -> None:
    config = OnPolicyJob(
        student=StudentConfig(model="tiny"),
        data=DataConfig(path="prompts.jsonl"),
        teacher=OnPolicyTeacher(address="a-very-long-name-of-a-teacher.example.invalid:50052"),
        name="a-name-without-any-place-to-break-it-which-is-wider-than-a-phone-is pause=0.1",
        max_steps=1000,
    )
    job = site.submit(config)
    eventually(lambda: site.job(job)["step"] >= 2)
    browser.resize(400)
    for page, ready in (
        ("#/", ".jobs tr"),
        (f"#/jobs/{job}", ".curve:not([hidden])"),
        ("#/teachers", ".card"),
        ("#/machine", ".whole tbody tr"),
        ("#/table?search=a-name-without", ".results tbody tr"),
        (f"#/compare/{job},{site.submit(max_steps=1)}", ".curve:not([hidden])"),
    ):
        browser.open(f"{site.url}/{page}")
        eventually(lambda: browser.count(ready) > 0)  # noqa: B023
        browser.run("document.querySelectorAll('main details').forEach(d => d.open = true)")
        wide = browser.run(
            "return [...document.querySelectorAll('main *')].filter(e =>"
            " e.getBoundingClientRect().right > 401"
            " && e.closest('pre, .filters, .wide > *') === null)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == [], page
        assert browser.run("return document.documentElement.scrollWidth") == 400, page


def test_parallel_coordinates_of_a_sweep(site: Site, browser: Browser) -> None:
    """A logarithmic axis, an axis of texts, and the best job as a line of its own."""
    browser.open(f"{site.url}/#/")
    rows = [
        {"id": job, "name": job, "labels": {"rate": rate, "loss": loss}, "is_best": job == "b",
         "best": {"value": value, "step": 1, "stderr": None}}
        for job, rate, loss, value in (
            ("a", "1e-5", "kl", 3.0), ("b", "1e-4", "jsd", 1.0), ("c", "1e-3", "kl", 2.0)
        )
    ]  # fmt: skip
    lines, best, ticks = browser.run(
        "return import('/parallel_chart.js').then(({parallelChart}) => {"
        "  const chart = parallelChart(arguments[0], 700);"
        "  const read = (line) => line.getAttribute('points').split(' ').map((point) =>"
        "    Number(point.split(',')[1]));"
        "  return [[...chart.querySelectorAll('a')].map((link) => [link.hash ?? link.href.baseVal,"
        "    read(link.firstChild.nextSibling)]),"
        "    chart.querySelector('.best').href.baseVal,"
        "    [...chart.querySelectorAll('text')].map((text) => text.textContent)]; })",
        {"metric": "eval/kl", "labels": ["rate", "loss"], "rows": rows},
    )
    heights = dict(lines)
    top, bottom = min(heights["#/jobs/a"]), max(heights["#/jobs/a"])
    middle = (top + bottom) / 2
    assert heights["#/jobs/a"] == [bottom, top, top]
    assert heights["#/jobs/b"] == pytest.approx([middle, bottom, bottom], abs=0.1)
    assert heights["#/jobs/c"] == pytest.approx([top, top, middle], abs=0.1)
    assert (best, lines[-1][0]) == ("#/jobs/b", "#/jobs/b"), "drawn last"
    assert ticks == [
        *("rate", "1e-5", "1e-4", "1e-3", "loss", "jsd", "kl", "eval/kl", "1", "2", "3")
    ]
    for row, rate in zip(rows, ("1e-4", "3e-5", "1e-5"), strict=True):
        row["labels"] = {"rate": rate}
    rows.append(rows[0] | {"id": "d", "name": "d", "labels": {}})
    ticks = browser.run(
        "return import('/parallel_chart.js').then(({parallelChart}) =>"
        "  [...parallelChart(arguments[0], 700).querySelectorAll('text')]"
        "    .map((text) => text.textContent))",
        {"metric": "eval/kl", "labels": ["rate"], "rows": rows},
    )
    assert ticks[:5] == ["rate", "1e-5", "3e-5", "1e-4", "-"]


def test_ticks_are_told_apart(site: Site, browser: Browser) -> None:
    browser.open(f"{site.url}/#/")
    for ticks, labels in (
        ([0.99998, 1, 1.00002], ["0.99998", "1", "1.00002"]),
        ([123400, 123410, 123420], ["123.40k", "123.41k", "123.42k"]),
        ([0, 0.5, 1], ["0", "0.5", "1"]),
    ):
        tick_labels = browser.run(
            f"return import('/figures.js').then(({{tickLabels}}) => tickLabels({ticks}))"
        )
        assert [label.rstrip("k") for label in tick_labels] == [
            str(float(label.rstrip("k"))).removesuffix(".0") for label in labels
        ]


def test_an_axis_fits_its_values(site: Site, browser: Browser) -> None:
    browser.open(f"{site.url}/#/")
    for values, spec, low, high in (
        ([1, 2], {}, 0.94, 2.06),
        ([0.9999999, 1.0000001], {}, 0.9, 1.1),  # rounding is no difference
        ([0, 0], {"percent": True}, 0, 1),
        ([0, 0], {}, 0, 1),
        ([0.5, 1], {"percent": True}, 0.47, 1),
        ([1, 3], {"zero": True}, 0, 3.18),
        ([1, 2, 0], {"log": True}, -0.12, 2.12),  # less than a power of ten
        ([0.01, 1, 0], {"log": True}, 0.01 / 100**0.06, 100**0.06),
    ):
        domain = browser.run(
            "return import('/axes.js').then(({domain}) => domain("
            f"{json.dumps(values)}, {json.dumps(spec)}))"
        )
        assert domain["low"] == pytest.approx(low, abs=1e-6)
        assert domain["high"] == pytest.approx(high, abs=1e-6)


def test_long_ticks_are_not_cut_off(site: Site, browser: Browser) -> None:
    """Importance weights near 1, and a tiny KL."""
    browser.open(f"{site.url}/#/")
    for values in ([0.9999989, 1, 1.0000011], [1.1e-13, 1.5e-13], [0.5, 1]):
        widths, room = browser.run(
            "return Promise.all([import('/curve.js'), import('/chart_view.js')])"
            ".then(([{Curve}, {ChartView}]) => {"
            "  const view = new ChartView(() => {}, () => {});"
            "  const curve = new Curve({title: 'x', unit: ''}, view);"
            "  document.querySelector('main').append(curve.element);"
            f"  const values = {values}, xs = values.map((_, step) => step);"
            "  const line = {label: 'x', colour: 0, held: true, xs, values, sampled: {xs, values}};"
            "  curve.draw([line], {low: 0, high: xs.length - 1});"
            "  const pen = document.createElement('canvas').getContext('2d');"
            "  pen.font = '11px system-ui';"
            "  return new Promise((resolve) => setTimeout(() => {"
            "    const axis = curve.uplot.axes[1];"
            "    resolve([axis._values.map((label) => pen.measureText(label).width), axis._size]);"
            "  })); })"
        )
        assert len(widths) > 1
        assert max(widths) < room, values


@pytest.mark.slow
def test_colours_tell_how_a_job_ended(site: Site, browser: Browser) -> None:
    fill = (
        "return getComputedStyle(document.querySelector('main progress'))"
        ".getPropertyValue('--fill')"
    )
    fills = set()
    with DistillClient(site.address) as client:
        for name, steps, state in (
            ("fine", 2, "succeeded"),
            ("fail_at=1", 2, "failed"),
            ("pause=0.1", 1000, "cancelled"),
        ):
            job = site.submit(name=name, max_steps=steps)
            if state == "cancelled":
                eventually(lambda job=job: site.job(job)["step"])
                client.cancel(job)
            browser.open(f"{site.url}/#/jobs/{job}")
            eventually(lambda state=state: browser.text(".title .badge") == state)
            fills.add(browser.run(fill))
            assert browser.attribute(".reason", "class") == f"reason {state}"
    assert len(fills) == 3


def test_states_and_a_server_that_comes_back(
    tmp_path: Path, make_site: Callable[..., Site], browser: Browser
) -> None:
    site = make_site()
    ids = [site.submit(name=f"fail_at=1 number-{n:02}", max_steps=1) for n in range(3)]
    eventually(lambda: all(site.job(job)["state"] == "FAILED" for job in ids))
    browser.open(f"{site.url}/#/")
    eventually(lambda: browser.count(".jobs tbody tr") == 3)
    browser.click(".filters [data-state=FAILED]")
    eventually(lambda: browser.attribute("[data-state=FAILED]", "aria-pressed") == "true")
    assert browser.count(".jobs tbody tr") == 3
    browser.click("[data-sort=name]")
    eventually(lambda: browser.attribute("th:first-child", "aria-sort") == "ascending")
    address = browser.run("return location.hash")
    assert address == "#/?state=FAILED&sort=name"
    browser.open(f"{site.url}/{address}")
    eventually(lambda: browser.count(".jobs tbody tr") == 3)
    assert browser.attribute(".jobs tbody tr", "data-job") == ids[0]
    heights = browser.run(
        "return [...document.querySelectorAll('.jobs tbody tr')].map((row) => row.offsetHeight)"
    )
    assert max(heights) <= 41
    browser.click(".jobs tbody tr a")
    eventually(lambda: "failed" in browser.text(".title"))
    assert browser.text(".reason") == "the loss is not finite"
    eventually(lambda: "starts after step 0" in browser.text("details[open] .log"))
    assert browser.run("return document.body.innerText").count("the loss is not finite") == 1
    job = browser.run("return location.hash").removeprefix("#/jobs/")
    commands = browser.texts("details[open] .commands code")
    assert commands[0] == f"distill resume {job} --server {site.address}"
    identity, keys = browser.text(".identity"), browser.text(".keys")
    assert identity.startswith("on-policy tiny <- teacher at localhost:50052 on prompts.jsonl")
    assert keys == "set by you: max_steps = 1"
    site.stop()
    eventually(lambda: browser.text("#link") == "server not reached")
    make_site(port=site.port)
    eventually(lambda: browser.text("#link") == "connected")
    browser.open("about:blank")
    # Discard the console's messages about requests while the server was stopped.
    browser.complaints()
