"""Trackers: what they are told, and that none of them can stop a run."""

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
from clients.preflight.trackers import check_trackers
from clients.runs.directory import RunDirectory
from clients.runs.metrics_writer import MetricsLog
from protos.errors import InvalidInput
from student_trainer.run import trackers
from student_trainer.run.trackers import ThreadedTracker
from tests.student_trainer import tiny

NAME = "on-policy-x-7f3a"
# Each attempt in a process of its own, as a resume is.
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
def _no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


class Failing:
    """Takes one step, then raises at the next, or at the end."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.told: list[int] = []
        if at == "start":
            raise RuntimeError("no network")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._at == "log" and self.told:
            raise RuntimeError("no network")
        self.told.append(step)

    def close(self) -> None:
        if self._at == "close":
            raise SystemError("no network")


@pytest.mark.parametrize("at", ["start", "log", "close"])
def test_a_tracker_that_raises_stops_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    other = Failing("never")
    tracked = [
        ThreadedTracker("broken", lambda: Failing(at)),
        ThreadedTracker("sound", lambda: other),
    ]
    log = MetricsLog(run, attempt=1, last_step=None, trackers=tracked)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            log.write(step, {"loss": 1.0})
        log.close()
    assert len(run.metrics.read_text().splitlines()) == 5
    assert other.told == [0, 1, 2, 3, 4]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("broken failed; the run continues without it: ")
    assert "no network" in told


def test_a_tracker_that_hangs_stops_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_CLOSE", 0.2)
    for_ever = threading.Event()

    class Hanging(Failing):
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


def attempt(kind: str, run: RunDirectory, number: int, last: int, *steps: int) -> str:
    arguments = [kind, str(run.path), *map(str, (number, last, *steps))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ATTEMPT, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the run continues without it" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def missing(name: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed; `make test-track` does")


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind a header of 7 bytes: blocks of 32 KiB, whose pieces have
    a checksum, a length, and a type: 1 is a whole record, 2 to 4 its first, middle and last part.
    """
    place, block, parts = 7, 32768, b""
    while place + 7 < len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


@missing("wandb")
def test_weights_and_biases_offline(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back from the file that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2 as pb

    monkeypatch.setenv("WANDB_MODE", "offline")
    attempt("wandb", run, 1, 0, 0, 1, 2)
    attempt("wandb", run, 2, 1, 2, 3)
    runs, steps = [], []
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for record in map(pb.Record.FromString, logged(path.read_bytes())):
            if record.HasField("run"):
                runs.append(record.run)
            items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
            if items:
                steps.append((json.loads(items["step"]), json.loads(items["loss"])))
    assert steps == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert {(r.run_id, r.display_name, r.project) for r in runs} == {(NAME, NAME, "ours")}
    assert {r.run_group for r in runs} == {"distill"}
    known = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert known["student"] == run.config().model_dump()["student"]


@missing("trackio")
def test_trackio(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    attempt("trackio", run, 1, 0, 0, 1, 2)
    attempt("trackio", run, 2, 1, 2, 3)
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id")
        found = [(name, of, step, json.loads(values)) for name, of, step, values in rows]
    assert [(step, values["loss"]) for _, _, step, values in found] == [
        *((0, 0.0), (1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5))
    ]
    assert len({(name, of) for name, of, _, _ in found}) == 1
    assert found[0][0] == NAME


def test_a_missing_key_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    asked = TrackConfig(wandb=TrackerConfig())
    with pytest.raises(
        InvalidInput, match=r"track\.wandb: there is no API key.*WANDB_MODE=offline"
    ):
        check_trackers(asked)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_trackers(asked)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.ours")
    with pytest.raises(InvalidInput, match="no API key"):
        check_trackers(asked)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "key")):
        with monkeypatch.context() as known:
            known.setenv(name, value)
            check_trackers(asked)


def test_a_tracker_that_is_not_installed_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(TrackConfig())
    for name in ("wandb", "trackio"):
        with pytest.raises(InvalidInput, match=f"track.{name}: {name} is not installed"):
            check_trackers(TrackConfig.model_validate({name: {}}))
