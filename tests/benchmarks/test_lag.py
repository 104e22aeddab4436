"""The benchmark of the lag: the age of the sampling weights, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollouts.lag import LagSizes, Run, main, train
from benchmarks.shared.model_pairs import Pair
from tests.student_trainer import tiny

SIZES = LagSizes(prompts=2, tokens=6, held_out=2, steps=4, k=4, draws=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root, words = tmp_path_factory.mktemp("pair"), tiny.tokenizer()
    teacher = tiny.save(tiny.model(seed=1, spread=0.2), words, root / "toy-teacher")
    return Pair(teacher, tiny.save(tiny.model(seed=2, spread=0.2), words, root / "toy-student"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+{n}="}) + "\n" for n in range(10, 40)))
    return path


@pytest.mark.slow
def test_the_sampler_is_as_far_behind_as_the_lag(pair: Pair, data: Path) -> None:
    run = Run(learning_rate=1e-2, lag=0, weighted=True, seed=0)
    results = {
        (lag, weighted): train(replace(run, lag=lag, weighted=weighted), pair, data, SIZES)
        for lag in (0, 1, 3, 8)
        for weighted in (True, False)
    }
    distances = [results[lag, True]["ratio/kl"] for lag in (0, 1, 3)]
    assert distances[0] < 1e-10 < 1e-4 < min(distances[1:])
    assert distances[1] != distances[2]
    assert results[0, True]["ratio/ess"] == pytest.approx(1, abs=1e-5)
    assert results[0, False]["after"] == pytest.approx(results[0, True]["after"], rel=1e-3)
    assert results[3, False]["after"] != pytest.approx(results[3, True]["after"], rel=1e-4)
    # All four steps are sampled by the first weights.
    assert results[3, True] == results[8, True]


@pytest.mark.slow
def test_runs_are_added_once_and_drawn(
    pair: Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    runs: list[Run] = []

    def train_scripted(run: Run, *_: Any) -> dict[str, Any]:
        runs.append(run)
        return {"after": run.learning_rate + run.lag, "ratio/ess": 1.0, "ratio/kl": 0.0}

    monkeypatch.setattr("benchmarks.rollouts.lag.train", train_scripted)
    out, picture = tmp_path / "lag.json", tmp_path / "lag.png"
    arguments = ["--data", str(data), "--work", str(pair.teacher.parent), "--out", str(out)]
    arguments += ["--picture", str(picture), "--steps", "4"]
    main([*arguments, "--seeds", "1"])
    first = len(runs)
    main([*arguments, "--seeds", "2"])
    assert len(runs) == 2 * first == len(json.loads(out.read_text())["runs"])
    assert len(set(runs)) == len(runs)
    assert picture.stat().st_size > 10_000
    assert f"wrote {picture}" in capsys.readouterr().out
