"""`distill plot` and `distill report` on run directories."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.config.on_policy import OnPolicyJob
from clients.jobs.job import JobEvent, JobState
from clients.jobs.plots.panels import Curve, Panel, choose_ticks, panels_of, smooth_curve
from clients.jobs.plots.report_page import report_page
from clients.jobs.plots.stages import bars_of, stages_of
from clients.jobs.plots.svg import panel_svg
from clients.jobs.plots.text import HEIGHT, panel_text
from clients.jobs.record import JobRecord, notes_in, points_of, record_of_run
from clients.runs.directory import RunDirectory, Status
from clients.runs.metrics_file import Point
from protos.errors import ExitCode, InvalidInput
from protos.extras import install_command

Capture = pytest.CaptureFixture[str]
MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Returns a function that writes a finished run directory: `steps` of falling loss and KL."""

    def make_directory(
        folder: str, steps: int = 100, scale: float = 1.0, **config: Any
    ) -> RunDirectory:
        values = {"student": {"model": "m"}, "data": {"path": "d"}, "max_steps": steps, **config}
        run = RunDirectory.create(tmp_path / folder, OnPolicyJob.model_validate(values))
        with run.metrics.open("w") as file:
            for step in range(steps + 1):
                metrics: dict[str, float] = {"attempt": 1, "step": step}
                if step % 50 == 0:
                    metrics |= {
                        "eval/kl": scale * math.exp(-step / 50),
                        "eval/accuracy": step / 100,
                    }
                if step:
                    metrics |= {"loss": scale / step, "kl/teacher": scale * math.exp(-step / 40)}
                    metrics |= {"tokens": 10.0, "tokens_per_sec": 5.0, "time/step": 2.0}
                    metrics |= {"time/rollout": 0.5, "time/teacher_wait": 1.0, "time/optim": 0.1}
                file.write(json.dumps(metrics) + "\n")
        run.write_status(Status(1, "succeeded", "", steps, steps))
        return run

    return make_directory


def make_event(attempt: int, step: int, **metrics: float) -> JobEvent:
    return JobEvent(
        seq=1, time=0.0, state=JobState.RUNNING, reason="", phase="", attempt=attempt, step=step,
        max_steps=9, metrics=metrics,
    )  # fmt: skip


def test_steps_that_were_done_again_count_once() -> None:
    events = [make_event(1, step, loss=1.0) for step in range(5)] + [make_event(2, 3)]
    events += [make_event(2, step, loss=2.0) for step in (3, 4, 5)] + [make_event(4, 5, loss=4.0)]
    losses = [(point.step, point.metrics["loss"]) for point in points_of(events)]
    assert losses == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 4)]


@pytest.mark.parametrize(
    ("values", "log", "low", "high"),
    [((0, 0), False, 0, 1), ((4, 4), False, 2, 6), ((-4,), False, -6, -2), ((3, 3), True, 2, 4.5)],
)
def test_a_level_curve_has_a_place(
    values: tuple[float, ...], log: bool, low: float, high: float
) -> None:
    curve = Curve("x", 0, list(enumerate(values, start=7)), held_out=True)
    panel = Panel("x", [curve], log)
    assert panel.spans()[2:] == (low, high)
    assert panel.spans()[:2] == ((7, 8) if len(values) > 1 else (6.5, 7.5))
    assert all(0 <= height <= 1 for height in panel.heights(values))


def test_a_plot_of_one_run(capsys: Capture, make_run: MakeRun) -> None:
    run = make_run("one")
    assert main(["plot", str(run.path)]) == 0
    output = capsys.readouterr().out
    titles = [line for line in output.splitlines() if line and line[0] != " "]
    assert titles == [
        "loss",
        "KL, nats per token (log)",
        "reward, accuracy  eval/accuracy",
        "tokens per second  tokens_per_sec",
    ]
    assert output.count("step  ") == 4
    assert max(map(len, output.splitlines())) <= 100
    assert "\033" not in output


def test_a_run_whose_answers_an_engine_samples(make_run: MakeRun) -> None:
    """Lag, importance weights and KL get panels only if the run has them."""
    run = make_run("ahead")
    rollout_metrics = {"rollout/lag": 2.0, "ratio/ess": 0.9, "ratio/mean": 1.01, "ratio/kl": 0.02}
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines_with_rollouts = [line | (rollout_metrics if line["step"] else {}) for line in lines]
    usual_titles = [panel.title for panel in panels_of([record_of_run(run.path)])]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines_with_rollouts))
    panels = panels_of([record_of_run(run.path)])
    labels = {panel.title: [curve.label for curve in panel.curves] for panel in panels}
    assert list(labels.values())[-3:] == [
        ["rollout/lag"],
        ["ratio/ess", "ratio/mean"],
        ["ratio/kl"],
    ]
    assert list(labels)[:-3] == usual_titles
    page = report_page(record_of_run(run.path))
    assert all(title in page for title in labels)


def test_runs_over_each_other(capsys: Capture, make_run: MakeRun) -> None:
    paths = [str(make_run(name, scale=scale).path) for name, scale in (("a", 1.0), ("b", 8.0))]
    assert main(["--json", "plot", *paths, paths[0], "-m", "kl/teacher", "-m", "loss"]) == 0
    kl_panel, loss_panel = json.loads(capsys.readouterr().out)["panels"]
    assert (kl_panel["title"], kl_panel["log"], loss_panel["title"]) == ("kl/teacher", True, "loss")
    first_curve, second_curve = kl_panel["curves"]
    assert (first_curve["label"], second_curve["label"]) == ("a", "b")
    assert first_curve["steps"] == list(range(1, 101))
    assert second_curve["values"][9] == 8 * first_curve["values"][9] == 8 * math.exp(-10 / 40)
    assert main(["plot", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["  a a", "  b b"]
    assert "b" in lines[3], "the higher curve is at the top"


def test_wrong_requests_are_one_sentence(capsys: Capture, make_run: MakeRun) -> None:
    run = make_run("one")
    path = str(run.path)
    for arguments, code, message in (
        (["plot", path, "-m", "los"], ExitCode.USAGE, "-m: no job has the metric 'los'; did you"),
        (
            ["plot", path, "-o", "x.jpg"],
            ExitCode.USAGE,
            "-o: x.jpg does not end in one of .png, .svg, .pdf",
        ),
        (["plot", "./nowhere"], ExitCode.NOT_FOUND, "./nowhere is not a run directory"),
        (["report", path, "-o", "x.pdf"], ExitCode.USAGE, "-o: x.pdf is not an HTML file"),
    ):
        assert main(arguments) == code
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {message}")
        assert (captured.out, captured.err.count("\n")) == ("", 1)
    run.metrics.write_text("")
    assert main(["plot", path]) == ExitCode.USAGE
    assert "no metrics are recorded yet: one" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "message_part"), [("gone", "gone: "), ("", "job.json: ")])
def test_a_run_of_another_version_is_one_sentence(
    capsys: Capture, make_run: MakeRun, key: str, message_part: str
) -> None:
    run = make_run("one")
    job = json.loads(run.job_json.read_text())
    run.job_json.write_text(json.dumps({**job, key: 1}) if key else "")
    for command in (["plot"], ["pull", "--checkpoint", "best"], ["run", "--resume"]):
        assert main([*command, str(run.path)]) == ExitCode.WRONG_STATE
        error_text = capsys.readouterr().err
        assert error_text.startswith(
            f"error: this version cannot read the job of {run.path}: {message_part}"
        )
        assert error_text.count("\n") == 1


def test_a_picture(capsys: Capture, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(make_run(name, steps).path) for name, steps in (("a", 100), ("b", 20))]
    assert main(["plot", *paths, "-o", "curves/both.svg"]) == 0
    assert capsys.readouterr().out == "curves/both.svg\n"
    svg = Path("curves/both.svg").read_text()
    assert "<!-- KL, nats per token -->" in svg
    assert "<!-- a -->" in svg
    assert "<!-- b -->" in svg
    assert main(["plot", paths[0], "-o", "one.png"]) == 0
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", paths[0], "-o", "two.png"]) == ExitCode.USAGE
    assert f"; {install_command('plot')}, or omit -o" in capsys.readouterr().err


def make_panel(*values: float, log: bool = False, title: str = "loss") -> Panel:
    points = [(float(step), value) for step, value in enumerate(values)]
    return Panel(title, [Curve(title, 0, points, True)], log)


def test_text_of_a_straight_line() -> None:
    text = panel_text(
        make_panel(0, 1, 2, 3, 4), width=13 + 11, dots=False, color=False
    ).splitlines()
    head, *rows, axis, steps = text
    assert (head, len(rows)) == ("loss", HEIGHT)
    assert (rows[0].split()[0], rows[HEIGHT // 2].split()[0], rows[-1].split()[0]) == (
        *("4", "2", "0"),
    )
    places = [row.index("a") for row in rows]
    assert places == sorted(places, reverse=True), "it rises from left to right"
    assert all(len(line) <= 13 + 11 + 3 for line in text)
    assert (axis.strip(" +-"), steps.split()) == ("", ["step", "0", "4"])


def test_dots_and_colors() -> None:
    text = panel_text(make_panel(0, 1), width=60, dots=True, color=True)
    assert "\033[34m" in text
    assert all(0x2800 <= ord(c) < 0x2900 for c in text if not c.isascii())


ODD = [(1.0,), (1.0, 1.0), (1e-9, 1e9)]


@pytest.mark.parametrize(
    ("values", "log"), [*((v, log) for v in ODD for log in (False, True)), ((0.0, -2.0), False)]
)
def test_any_values_can_be_drawn(values: tuple[float, ...], log: bool) -> None:
    panel = make_panel(*values, log=log)
    assert panel_text(panel, width=40, dots=True, color=False)
    places = [float(n) for n in re.findall(r"c[xy]=\"([-0-9.]+)\"", panel_svg(panel))]
    assert len(places) == 2 * len(values)
    assert all(0 <= place <= 520 for place in places)


def test_ticks_are_round_and_inside() -> None:
    assert choose_ticks(0.0, 1.0, log=False) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert choose_ticks(0.17, 0.77, log=True) == pytest.approx([0.2, 0.4, 0.6])
    assert choose_ticks(0.001, 1000.0, log=True) == pytest.approx([10.0**p for p in (-3, -1, 1, 3)])
    for low, high in ((3.0, 700.0), (0.02, 0.021), (-5.0, 12.0), (1e6, 9e6)):
        ticks = choose_ticks(low, high, log=False)
        assert 2 <= len(ticks) <= 6
        assert low <= min(ticks) <= max(ticks) <= high


def test_smoothing_keeps_a_line_and_calms_noise() -> None:
    line = [(float(x), 2.0 * x) for x in range(200)]
    assert [y for _, y in smooth_curve(line)][5:-5] == pytest.approx([y for _, y in line][5:-5])
    noise = [(float(x), float(x % 2)) for x in range(200)]
    assert all(0.3 < y < 0.7 for _, y in smooth_curve(noise))
    assert smooth_curve(line[:10]) == line[:10]


def test_a_negative_kl_is_left_out_of_a_logarithm(make_run: MakeRun) -> None:
    record = record_of_run(make_run("one", steps=3).path)
    negative_point = replace(record.points[1], metrics={"kl/teacher": -0.1})
    (panel,) = panels_of(
        [JobRecord(record.job, [negative_point, *record.points[2:]])], ["kl/teacher"]
    )
    assert (panel.log, [x for x, _ in panel.curves[0].points]) == (True, [2, 3])
    (panel,) = panels_of([JobRecord(record.job, [negative_point])], ["kl/teacher"])
    assert not panel.log
    with pytest.raises(InvalidInput, match="no job has"):
        panels_of([record], ["reward"])


def test_stages_are_stacked_to_the_time_of_a_step(make_run: MakeRun) -> None:
    """Ten steps in three bars; `time/anchor` starts in step 7, learning is the remaining time."""
    points = [Point(0, {"eval/kl": 1.0})]
    for step in range(1, 11):
        metrics = {"time/step": 10.0, "time/rollout": float(step), "time/optim": 0.5}
        points.append(Point(step, metrics | ({"time/anchor": 1.0} if step > 6 else {})))
    record = replace(record_of_run(make_run("one").path), points=points)
    stages = stages_of(record)
    assert [stage.metric for stage in stages] == ["time/rollout", "time/anchor", "", "time/optim"]
    bars = bars_of(record, stages, max_bars=3)
    assert [(bar.first, bar.last) for bar in bars] == [(1, 4), (5, 8), (9, 10)]
    assert [list(bar.seconds) for bar in bars] == [
        [2.5, 0, 7, 0.5],
        [6.5, 0.5, 2.5, 0.5],
        [9.5, 1, 0, 0.5],
    ]
    assert stages_of(replace(record, points=points[:1])) == []


def test_a_report_without_a_teacher_names_what_it_did(make_run: MakeRun) -> None:
    metrics = {"tokens": 10.0, "time/step": 2.0, "time/rollout": 0.5, "time/teacher_wait": 1e-6}
    points = [Point(step, metrics | {"time/optim": 0.1}) for step in range(1, 11)]
    record = replace(record_of_run(make_run("one").path), points=points)
    words = Page(report_page(record)).words
    assert {"making the sequences", "tokens learned", "optimizer"} <= set(words)
    assert not {"sampling rollouts", "waiting for the teacher", "tokens scored"} & set(words)
    answers = [replace(point, metrics=point.metrics | {"length/truncated": 0}) for point in points]
    job = replace(record.job, state=JobState.QUEUED, phase="WAITING disk")  # as in `distill show`
    words = Page(report_page(replace(record, points=answers, job=job))).words
    assert "QUEUED WAITING disk" in words
    assert "sampling rollouts" in words


class Page(HTMLParser):
    """The report as a browser parses it: words, tags, and URLs that it would fetch."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] if tag not in self.VOID else []
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "srcset", "onload")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_report_needs_nothing_else(capsys: Capture, make_run: MakeRun) -> None:
    run = make_run("one", name="<script>alert(1)</script>")
    run.samples.mkdir()
    for step in (50, 100):
        sample = {"prompt": f"at {step}?", "answer": "<b>&", "reference": "4"}
        line = json.dumps(sample) + "\n"
        (run.samples / f"step-{step:06d}.jsonl").write_text(line + line[:9])
    (run.path / "environment.json").write_text('{"torch": "9.9.9"}')
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == "one.html\n"
    text = Path("one.html").read_text()
    page = Page(text)
    assert (page.open, page.fetched) == ([], [])
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.tags.count("svg") == 5
    # The stage chart: four stages in 25 bars of 4 steps.
    assert page.tags.count("rect") == 4 * 25
    for word in ("<script>alert(1)</script>", "SUCCEEDED", "at 100?", "<b>&", "9.9.9", "Reports"):
        assert (word in page.words) is (word != "Reports")
    assert "at 50?" not in page.words
    assert "prefers-color-scheme: dark" in text
    assert "1.000 \u2192 0.135" in page.words, "held-out KL"
    assert "50%, 1m40s" in page.words, "waiting for the teacher"


def test_a_report_of_a_run_that_never_began(make_run: MakeRun, capsys: Capture) -> None:
    run = make_run("early")
    run.metrics.unlink()
    run.write_status(Status(1, "failed", "preflight", 0, 9, "no teacher; start one"))
    assert main(["--json", "report", str(run.path), "-o", "r.html"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "r.html"}
    page = Page(Path("r.html").read_text())
    assert "No metrics were recorded." in page.words
    assert ": no teacher; start one" in page.words
    assert notes_in(run.path).samples == ()
