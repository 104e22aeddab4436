"""Trackers: logged values, and faults, which never stop a run."""

from __future__ import annotations

import importlib.util
import json
import logging
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from clients.config.tables.common import TrackConfig, TrackerConfig
from clients.preflight.packages import check_trackers
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import MetricsLog
from protos.errors import InvalidInput
from student_trainer.run import trackers
from student_trainer.run.trackers import ThreadedTracker
from tests.student_trainer import tiny

NAME = "on-policy-x-7f3a"
# Each attempt runs in a new process, as after a resume.
ATTEMPT = """
import sys
from clients.config.tables.common import (TrackConfig, TrackerConfig)
from clients.runs.directory import RunDirectory
from student_trainer.run.metrics import open_metrics
kind, path, attempt, last, *steps = sys.argv[1:]
track = TrackConfig(tensorboard=False, **{kind: TrackerConfig(project="ours")})
last = int(last) or None
log = open_metrics(RunDirectory(path), attempt=int(attempt), last_step=last, track=track)
for step in map(int, steps):
    log.write(step, {"loss": step / 2})
log.close()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    material = tiny.Material.at(tmp_path)
    return RunDirectory.create(tmp_path / NAME, tiny.job(material))


@pytest.fixture(autouse=True)
def _delete_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


class FailingTracker:
    """Raises at the start, at the second step, or at the end."""

    def __init__(self, failing_call: str) -> None:
        self._failing_call = failing_call
        self.logged_steps: list[int] = []
        if failing_call == "start":
            raise RuntimeError("no network")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._failing_call == "log" and self.logged_steps:
            raise RuntimeError("no network")
        self.logged_steps.append(step)

    def close(self) -> None:
        if self._failing_call == "close":
            raise SystemError("no network")


@pytest.mark.parametrize("at", ["start", "log", "close"])
def test_a_tracker_that_raises_stops_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    sound_tracker = FailingTracker("never")
    threaded_trackers = [
        ThreadedTracker("broken", lambda: FailingTracker(at)),
        ThreadedTracker("sound", lambda: sound_tracker),
    ]
    log = MetricsLog(run, attempt=1, last_step=None, trackers=threaded_trackers)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            log.write(step, {"loss": 1.0})
        log.close()
    assert len(run.metrics.read_text().splitlines()) == 5
    assert sound_tracker.logged_steps == [0, 1, 2, 3, 4]
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("broken failed; the run continues without it: ")
    assert "no network" in message


def test_a_tracker_that_hangs_stops_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_CLOSE", 0.2)
    for_ever = threading.Event()

    class Hanging(FailingTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            for_ever.wait()

    log = MetricsLog(
        run, attempt=1, last_step=None, trackers=[ThreadedTracker("slow", lambda: Hanging("never"))]
    )
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            log.write(step, {"loss": 1.0})
        log.close()
    for_ever.set()
    assert len(run.metrics.read_text().splitlines()) == 5
    assert "slow did not finish within 0.2 s; its last values may be missing" in caplog.text


def run_attempt(kind: str, run: RunDirectory, number: int, last: int, *steps: int) -> str:
    arguments = [kind, str(run.path), *map(str, (number, last, *steps))]
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", ATTEMPT, *arguments], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert "the run continues without it" not in completed.stderr, completed.stderr
    return completed.stdout + completed.stderr


def skip_without(name: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed; `make test-track` does")


def read_leveldb(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log after a header of 7 bytes: blocks of 32 KiB, whose pieces
    have a checksum, a length, and a type: 1 is a whole record, 2 to 4 first, middle, last part.
    """
    position, block, parts = 7, 32768, b""
    while position + 7 < len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


@skip_without("wandb")
def test_weights_and_biases_offline(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back from the file that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2 as pb

    monkeypatch.setenv("WANDB_MODE", "offline")
    run_attempt("wandb", run, 1, 0, 0, 1, 2)
    run_attempt("wandb", run, 2, 1, 2, 3)
    runs, steps = [], []
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for record in map(pb.Record.FromString, read_leveldb(path.read_bytes())):
            if record.HasField("run"):
                runs.append(record.run)
            items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
            if items:
                steps.append((json.loads(items["step"]), json.loads(items["loss"])))
    assert steps == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert {(r.run_id, r.display_name, r.project) for r in runs} == {(NAME, NAME, "ours")}
    assert {r.run_group for r in runs} == {"distill"}
    stored_config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert stored_config["student"] == run.config().model_dump()["student"]


@skip_without("trackio")
def test_trackio(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_attempt("trackio", run, 1, 0, 0, 1, 2)
    run_attempt("trackio", run, 2, 1, 2, 3)
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id")
        records = [(name, run_id, step, json.loads(values)) for name, run_id, step, values in rows]
    assert [(step, values["loss"]) for _, _, step, values in records] == [
        *((0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5))
    ]
    assert len({(name, run_id) for name, run_id, _, _ in records}) == 1
    assert records[0][0] == NAME


def test_a_missing_key_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    track = TrackConfig(wandb=TrackerConfig())
    with pytest.raises(
        InvalidInput, match=r"track\.wandb: there is no API key.*WANDB_MODE=offline"
    ):
        check_trackers(track)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_trackers(track)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.ours")
    with pytest.raises(InvalidInput, match="no API key"):
        check_trackers(track)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "key")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            check_trackers(track)


def test_a_tracker_that_is_not_installed_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(TrackConfig())
    for name in ("wandb", "trackio"):
        with pytest.raises(InvalidInput, match=f"track.{name}: {name} is not installed"):
            check_trackers(TrackConfig.model_validate({name: {}}))
