"""What jobs show in Python: reprs, HTML, curves, frames, comparisons and the live view."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.jobs.display.job_display import AnswerSamples, JobDisplay, JobList
from clients.jobs.job import JobEvent, JobState
from clients.jobs.plots.preview_html import PreviewDisplay
from clients.jobs.record import JobRecord, Notes
from clients.runs.metrics_file import Point
from protos.errors import InvalidInput, NotFound, Unavailable

EVIL = '<script>alert("&")</script>'
CONFIG = OnPolicyJob.model_validate(
    {
        "name": EVIL,
        "student": {"model": "tiny"},
        "teacher": {"address": "host:1"},
        "data": {"path": "a.jsonl"},
        "max_steps": 4,
    }
)
POINTS = [
    Point(0, {"eval/kl": 0.9}),
    Point(1, {"kl/teacher": 0.5, "loss": 0.7}),
    Point(2, {"kl/teacher": 0.25, "loss": 0.3, "eval/kl": 0.4}),
]
NOTES = Notes(samples_step=2, samples=[{"prompt": EVIL, "completion": "4"}])


class ShownJob(JobDisplay):
    """A job of a script."""

    def record(self, *, with_notes: bool = False) -> JobRecord:
        if self.reason == "away":
            raise Unavailable("no server")
        points = POINTS if self.metrics else []
        return JobRecord(self, points, NOTES if with_notes and self.metrics else Notes())

    def watch(self, after_seq: int = 0, *, timeout: float | None = None) -> Iterator[JobEvent]:
        running = JobState.RUNNING
        for seq, point in enumerate(POINTS, start=1):
            yield JobEvent(seq, seq, running, "", "training", 1, point.step, 4, point.metrics)
        yield JobEvent(9, 9.0, JobState.FAILED, EVIL, "", 1, 2, 4)


def make_job(name: str = EVIL, step: int = 2, **changes: Any) -> ShownJob:
    values: dict[str, Any] = {
        "metrics": POINTS[-1].metrics,
        "config_json": CONFIG.model_dump_json(),
    }
    times = {"created_at": 0, "started_at": 0, "ended_at": 0, "last_seq": 1}
    state = {"state": JobState.RUNNING, "reason": "", "phase": "training", "attempt": 1}
    values |= {"id": "job-1", "name": name, "kind": "on_policy", "step": step, "max_steps": 4}
    return ShownJob(**(values | times | state | changes))


class Reader(HTMLParser):
    """The tags and the text of HTML. Every tag must be closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data


def read_html(shown: Any) -> Reader:
    html = shown._repr_html_()
    reader = Reader(html)
    assert html.startswith('<div class="distill-view"><style>.distill-view')
    assert "script" not in reader.tags
    return reader


def test_a_job_shows_its_state_curve_and_set_keys() -> None:
    job = make_job()
    assert repr(job) == (f"<ShownJob job-1  {EVIL!r}  on_policy  RUNNING training  2/4  0.25 kl>")
    reader = read_html(job)
    assert "svg" in reader.tags
    assert EVIL in reader.text
    for text in (
        "RUNNING training",
        "step 2 of 4",
        "0.25 kl",
        "2 keys differ",
        "tiny <- teacher at host:1, a.jsonl",
        "eval/kl: 0.9 at step 0, 0.4",
        "host:1",
    ):
        assert text in reader.text, text
    assert "learning_rate" not in reader.text
    # Without a server or metrics, and with the configuration of a newer server.
    for other in (
        make_job(reason="away"),
        make_job(metrics={}),
        make_job(config_json='{"new": 1}'),
    ):
        assert EVIL in read_html(other).text
    assert "svg" not in read_html(make_job(reason="away")).tags


def test_lists_and_comparisons_are_the_tables_of_the_command_line() -> None:
    jobs = JobList([make_job("a", labels={"lr": EVIL}), make_job("b", id="job-2", owner="me")])
    lines = repr(jobs).splitlines()
    assert lines[0].split() == [
        "ID",
        "STATE",
        "STEPS",
        "RESULT",
        "AGE",
        "ATTEMPT",
        "OWNER",
        "NAME",
        "REASON",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["job-1", "job-2"]
    assert "0.25 kl" in read_html(jobs).text
    comparison = jobs.compare()
    assert comparison.metric == "eval/kl"
    assert repr(comparison).splitlines()[0].split() == [
        "ID",
        "LR",
        "STATE",
        "STEPS",
        "EVAL/KL",
        "BEST",
    ]
    assert EVIL in read_html(comparison).text
    assert read_html(comparison).text.count("0.4 @2") == 4
    with pytest.raises(InvalidInput, match="did you mean 'eval/kl'"):
        jobs.compare("eval/lk")
    assert repr(JobList[ShownJob]()) == "[]"
    assert "no jobs" in read_html(JobList[ShownJob]()).text


def test_curves_and_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, values = make_job().curve("kl/teacher")
    assert (steps.tolist(), values.tolist()) == ([1, 2], [0.5, 0.25])
    with pytest.raises(InvalidInput, match=r"metric.*did you mean 'kl/teacher'"):
        make_job().curve("kl/teachr")
    with pytest.raises(InvalidInput, match="has not recorded a metric yet"):
        make_job(metrics={}).curve("loss")
    frame = make_job().frame()
    assert [*frame.columns] == ["eval/kl", "kl/teacher", "loss"]
    assert frame["loss"].dropna().to_dict() == {1: 0.7, 2: 0.3}
    assert frame.index.name == "step"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInput, match=r"frame\(\) needs pandas"):
        make_job().frame()


def test_samples_and_previews_are_escaped() -> None:
    samples = make_job().samples()
    assert repr(samples) == "<AnswerSamples of step 2: 1 answers>"
    assert isinstance(samples, AnswerSamples)
    assert EVIL in read_html(samples).text
    with pytest.raises(NotFound, match="has no samples"):
        make_job(metrics={}).samples()
    with pytest.raises(NotFound, match="has no preview"):
        make_job().preview()
    preview = PreviewDisplay("sft", (EVIL,), ((EVIL, EVIL),), ())
    assert repr(preview) == f"<Preview of sft: 0 records; {EVIL}>"
    assert read_html(preview).text.count(EVIL) == 3


def test_outside_a_notebook_the_view_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    make_job().show()
    lines = capsys.readouterr().out.splitlines()
    assert "RUNNING training" in lines[0]
    assert lines[-1].endswith(EVIL)


def test_the_view_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    drawings: list[str] = []

    class Output:
        def update(self, content: Any) -> None:
            drawings.append(content.data)

    def draw(content: Any, *, display_id: bool) -> Output:
        drawings.append(content.data)
        return Output()

    monkeypatch.setattr("clients.jobs.display.live._in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", draw)
    make_job().show()
    last = Reader(drawings[-1])
    assert "script" not in last.tags
    for text in ("FAILED", EVIL, "KL, nats per token", "Samples of step 2"):
        assert text in last.text, text
    drawings.clear()
    make_job().show(["loss"])
    assert "KL, nats" not in Reader(drawings[-1]).text
