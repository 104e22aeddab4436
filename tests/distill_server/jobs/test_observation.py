"""Concurrent requests to stop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from clients.runs.directory import Control, RunDirectory
from distill_server.jobs.observation import request_stop


def test_now_is_not_changed_back_by_a_request_that_was_about_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler repeats a request for a checkpoint while a person cancels at once."""
    run = RunDirectory(tmp_path)
    run.write_control(Control())
    has_read, has_written = threading.Event(), threading.Event()
    read_control = RunDirectory.read_control

    def read_slowly(self: RunDirectory) -> Control:
        control = read_control(self)
        has_read.set()
        has_written.wait(1)  # not set before this request has ended
        return control

    monkeypatch.setattr(RunDirectory, "read_control", read_slowly)
    repeated = threading.Thread(target=request_stop, args=(run,), kwargs={"now": False})
    repeated.start()
    assert has_read.wait(10)
    request_stop(run, now=True)
    has_written.set()
    repeated.join()
    assert read_control(run).stop == "now"
