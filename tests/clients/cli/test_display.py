"""The terminal output while a job runs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest

from clients.cli.live.display import LiveBlock, PlainLines, display
from clients.cli.output import Output
from clients.jobs.job import JobEvent, JobState
from clients.jobs.view import JobView, duration, sparkline
from protos.errors import InvalidInput


def step_event(number: int, *, attempt: int = 1, **metrics: float) -> JobEvent:
    all_metrics: Mapping[str, float] = {"loss": 0.5, "kl/teacher": 1 / number, **metrics}
    return JobEvent(
        seq=number,
        time=1000.0 + 2 * number,
        state=JobState.RUNNING,
        reason="",
        phase="training",
        attempt=attempt,
        step=number,
        max_steps=100,
        metrics=all_metrics,
    )


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def attach_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr. Not a fixture, because pytest sets its own stderr when a test begins."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def test_numbers_of_the_newest_step() -> None:
    job = JobView("job")
    for number in range(1, 11):
        job.add(
            step_event(
                number, **{"tokens_per_sec": 512.4, "time/step": 2.0, "time/teacher_wait": 0.5}
            )
        )
    assert job.facts() == [
        ("loss", "0.5"),
        ("kl", "0.1"),
        ("tok/s", "512"),
        ("wait", "25%"),
        ("eta", "3m00s"),
    ]


def test_a_bound_of_the_kl_has_its_own_name() -> None:
    """A store without samples has only the bound; a mixed job has the KL and the bound, of
    different tokens.
    """
    stored_only, mixed = JobView("alone"), JobView("mixed")
    event = step_event(4)
    stored_only.add(replace(event, metrics={"kl/teacher_bound": 0.125}))
    mixed.add(replace(event, metrics={**event.metrics, "kl/teacher_bound": 0.125}))
    assert stored_only.facts() == [("kl bound", "0.125")]
    assert mixed.facts() == [("loss", "0.5"), ("kl", "0.25"), ("kl bound", "0.125")]
    assert (stored_only.kl_history, mixed.kl_history) == ([0.125], [0.25])


def test_a_new_attempt_starts_a_new_clock() -> None:
    job = JobView("job")
    job.add(step_event(1))
    job.add(step_event(2))
    assert job.seconds_left == 196.0
    job.add(step_event(3, attempt=2))
    assert job.seconds_left is None


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59, 60, 200, 3600, 7500)] == [
        "0s", "59s", "1m00s", "3m20s", "1h00m", "2h05m",
    ]  # fmt: skip


def test_sparkline() -> None:
    assert sparkline([0.0, 1.0, 0.5], unicode=False) == "_#="
    assert sparkline([1.0, 1.0]) == "\u2581\u2581"
    assert sparkline([]) == ""


def test_a_long_history_is_a_curve_of_its_means() -> None:
    falling = [1000.0 - i for i in range(997)]
    curve = sparkline(falling, width=8)
    assert curve == "".join(map(chr, range(0x2588, 0x2580, -1)))


def test_one_line_in_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_seconds = 0.0
    monkeypatch.setattr("clients.jobs.display.lines.time.monotonic", lambda: clock_seconds)
    job = JobView("job")
    lines = PlainLines(job, Output().say)
    for number in range(1, 41):
        clock_seconds = float(number)
        job.add(event := step_event(number))
        lines.show(event)
    printed_lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[2] for line in printed_lines] == [
        "1/100",
        "11/100",
        "21/100",
        "31/100",
    ]


def test_live_block(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    job = JobView("job-7f3a")
    with display(Output(), job) as live_display:
        assert isinstance(live_display, LiveBlock)
        for number in range(1, 21):
            job.add(event := step_event(number, **({"eval/kl": 0.25} if number == 10 else {})))
            live_display.show(event)
    output = terminal.getvalue()
    last_block = output.rsplit("job-7f3a", 1)[1]
    for text in (
        "RUNNING training",
        "20/100",
        "loss 0.5",
        "kl 0.05",
        "eta 2m40s",
        "\u2588\u2584\u2583",
    ):
        assert text in last_block
    assert "eval/kl 0.25" in output
    assert "\033[36m" in output


def test_no_color_keeps_the_block_and_drops_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    with display(Output(color=False), job := JobView("job")) as live_display:
        job.add(event := step_event(1))
        live_display.show(event)
    assert "1/100" in terminal.getvalue()
    assert "\033[36m" not in terminal.getvalue()


def test_errors_are_red_on_a_terminal_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    Output().fail(InvalidInput("no"))
    Output(color=False).fail(InvalidInput("no"))
    assert terminal.getvalue() == "\033[1;31merror:\033[0m no\nerror: no\n"


def test_quiet_and_dumb_terminals_get_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attach_terminal(monkeypatch)
    assert Output().live
    assert not Output(quiet=True).live
    monkeypatch.setenv("TERM", "dumb")
    assert not Output().live
