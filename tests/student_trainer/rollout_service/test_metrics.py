"""Metrics of a running rollout service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protos.errors import Corrupt
from student_trainer.rollout_client.engine_client import EngineClient
from tests.scraping import metrics_address, scrape
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.material import order, probe_of, snapshot, student

P = "distill_rollouts_"


def test_metrics_say_what_happened(start_service: StartService, tmp_path: Path) -> None:
    service = start_service("--metrics-port", "0")
    address = metrics_address(service.log)
    metrics_before = scrape(address)
    assert metrics_before[P + "weights_version"] == -1
    assert {metrics_before[P + name] for name in ("orders_total[OK]", "sampled_tokens_total")} == {
        0
    }
    wrong_snapshot = snapshot(tmp_path, 2, student(2), probe_of(student(9)))
    with EngineClient([service.address]) as client:
        tokens = 0
        for first in (0, 8):
            sent_order = order(tmp_path / "v1" if first else snapshot(tmp_path, 1), first=first)
            tokens += sum(len(sequence.token_ids) for _, sequence in client.sample(sent_order))
        with pytest.raises(Corrupt):
            list(client.sample(order(wrong_snapshot, number=2)))
    metrics_after = scrape(address)
    expected = {
        "orders_total[OK]": 2,
        "orders_total[DATA_LOSS]": 1,
        "orders_total[CANCELLED]": 0,
        "sequences_total": 16,
        "sampled_tokens_total": tokens,
        "weight_loads_total[OK]": 1,
        "weight_loads_total[DATA_LOSS]": 1,
        "weight_load_seconds_count": 1,
        "order_seconds_count": 2,
        "weights_version": -1,
        "running_orders": 0,
        "waiting_orders": 0,
        "held_bytes": 0,
    }
    assert {name: metrics_after.get(P + name) for name in expected} == expected


def test_every_metric_is_explained(start_service: StartService) -> None:
    metrics = scrape(metrics_address(start_service("--metrics-port", "0").log))
    names = {
        re.sub(r"\[.*|_(bucket|count|sum|created)$", "", name.split("[")[0])
        for name in metrics
        if not name.startswith("process_")
    }
    page = (Path(__file__).parents[3] / "docs/rollouts.md").read_text()
    explained = set(re.findall(r"^\| `(distill_rollouts_\w+)` \|", page, re.MULTILINE))
    created = {name.removesuffix("_total") for name in explained if name.endswith("_total")}
    assert names - created == explained
