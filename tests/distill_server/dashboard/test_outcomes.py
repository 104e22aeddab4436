"""What the list shows of each job, and its orders and filters by label."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import parse_job
from clients.jobs.job import JobState
from clients.jobs.results import progress_metric
from distill_server.dashboard.outcomes import Outcomes, results_table
from distill_server.jobs.database import open_database
from distill_server.jobs.rows import JobFilter, ListOrder
from distill_server.jobs.store import Attempt, Change, JobStore, NewJob
from protos.errors import InvalidInput
from tests.distill_server.conftest import job_config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    times = iter(range(1, 10_000))
    with open_database(tmp_path / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        yield JobStore(connection, on_change=lambda _: None, now=lambda: float(next(times)))


def add_job(store: JobStore, name: str, steps: int = 0, **values: Any) -> None:
    config = job_config(name, max_steps=steps or 5).model_copy(update=values)
    config = parse_job(config.model_dump_json())  # type: ignore[assignment]
    store.add_all([NewJob(name, config, config, owner=f"owner of {name}")])
    if steps:
        store.change(name, Change(state=JobState.PREPARING))
        store.change(name, Change(state=JobState.RUNNING))
    for step in range(1, steps + 1):
        metrics = {"loss": 9.0, "kl/teacher": 1 / step}
        if step in (10, 20, 30):
            metrics["eval/kl"] = abs(step - 20) + 0.5
        store.change(name, Change(step=step, metrics=metrics))


def test_progress_and_evaluations(store: JobStore) -> None:
    add_job(store, "long", 100)
    add_job(store, "new")
    outcomes = Outcomes(store)
    outcome = outcomes.describe(store.job("long"))
    assert outcome["summary"] == "tiny <- teacher at localhost:50052, prompts.jsonl"
    result = outcome["result"]
    assert (result["metric"], result["label"], result["value"]) == ("kl/teacher", "kl", 0.01)
    assert len(result["curve"]) <= 32
    assert result["curve"] == sorted(result["curve"], reverse=True)
    assert result["curve"][0] == 1.0
    best = {"value": 0.5, "step": 20}
    expected = {"metric": "eval/kl", "label": "kl", "value": 10.5, "step": 30, "best": best}
    assert outcome["held_out"] == expected
    new = outcomes.describe(store.job("new"))
    assert (new["result"], new["held_out"]) == (None, None)
    store.change("long", Change(step=101, metrics={"kl/teacher": 0.001}))
    assert outcomes.describe(store.job("long"))["result"]["value"] == 0.001


@pytest.mark.parametrize(
    ("method", "metrics", "label"),
    [
        ("rl", {"kl/anchor": 1, "reward/mean": 1}, "reward"),
        ("sft", {"loss": 1, "cross_entropy": 1}, "loss"),
        ("offline", {"kl/teacher_bound": 1, "cross_entropy": 1}, "kl bound"),
        ("eval", {"eval/accuracy": 1}, "accuracy"),
        ("capture", {"bytes": 1, "tokens_per_sec": 1}, "stored"),
        ("on_policy", {"loss": 1}, None),
    ],
)
def test_the_metric_of_a_method(
    method: str, metrics: Mapping[str, float], label: str | None
) -> None:
    progress = progress_metric(method, metrics)
    assert (progress and progress[1]) == label


def test_orders_and_labels(store: JobStore) -> None:
    add_job(store, "b-short", 2, labels={"project": "math", "seed": "1"})
    add_job(store, "a-long", 9, labels={"project": "chat"})
    add_job(store, "c-none", labels={"project": "math", "seed": "11"})

    def list_names(key: str = "-submitted", search: str = "", offset: int = 0) -> str:
        order = ListOrder(key.removeprefix("-"), key.startswith("-"))
        jobs = store.page(limit=9, job_filter=JobFilter(search), order=order, offset=offset)
        return " ".join(job.name[0] for job in jobs)

    assert list_names() == "c a b"
    assert list_names(offset=1) == "a b"
    assert list_names("name") == "a b c"
    assert list_names("-name") == "c b a"
    assert list_names("-time") == "b a c", "a job that has not started comes last"
    assert list_names("time") == "a b c"
    assert list_names("-progress") == "a b c"
    assert list_names("owner") == "a b c"
    assert list_names(search="project=math") == "c b"
    assert list_names(search="seed=1 project=math") == "c b"
    assert list_names(search="seed=11") == "c"
    assert list_names(search="project=math chat") == ""
    with pytest.raises(InvalidInput, match="expected one of submitted, name"):
        ListOrder("metrics; DROP TABLE jobs")


def test_the_table_of_a_sweep(store: JobStore) -> None:
    """A smaller held-out KL is better; the best one may be of an earlier step."""
    for name, seed, kls in (
        ("first", "1", (3.0, 2.0)),
        ("won", "2", (1.0, 1.5)),
        ("none", "3", ()),
    ):
        add_job(store, name, 2, labels={"sweep": "x", "seed": seed})
        for step, kl in enumerate(kls, 3):
            store.change(name, Change(step=step, metrics={"eval/kl": kl}))
    add_job(store, "other", 2)
    table = results_table(Outcomes(store), store.page(limit=9, job_filter=JobFilter("sweep=x")))
    assert (table["metric"], table["labels"]) == ("eval/kl", ["seed"])
    rows = table["rows"]
    assert [(row["id"], row["is_best"]) for row in rows] == [
        *(("won", True), ("first", False), ("none", False))
    ]
    assert rows[0]["best"] == {"value": 1.0, "step": 3, "stderr": None}
    assert rows[0]["last"]["value"] == 1.5
    assert (rows[2]["best"], rows[2]["last"]) == (None, None)
    assert results_table(Outcomes(store), [])["rows"] == []


def test_new_evaluations_are_added_to_those_that_were_read(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle reads all events. A read costs the new events only, except after a retry."""
    add_job(store, "grows", 2, labels={"seed": "1"})
    outcomes, noise, counts = Outcomes(store), random.Random(0), []
    read = store.evaluations

    def count_events(*parameters: Any) -> Any:
        events = read(*parameters)
        counts.append(len(events))
        return events

    attempt = 1
    for step in (*range(3, 90), *range(40, 70)):
        if step == 40 and attempt == 1 and store.job("grows").step == 89:
            attempt = 2
            store.queue_again(
                "grows", Attempt(2), Change(state=JobState.QUEUED, reason="died"), at_end=False
            )
            store.change("grows", Change(state=JobState.PREPARING), Change(state=JobState.RUNNING))
        metrics = {"loss": 1.0, "eval/other": 1.0}
        if step % 3 == 0:
            metrics |= {"eval/kl": noise.choice((1.0, 2.0, 3.0)), "eval/kl_stderr": 0.1}
        if step % 10 == 0:
            metrics["eval/cross_entropy"] = noise.random()
        store.change("grows", Change(step=step, metrics=metrics))
        job = store.job("grows")
        expected = (Outcomes(store).describe(job), results_table(Outcomes(store), [job]))
        monkeypatch.setattr(store, "evaluations", count_events)
        assert (outcomes.describe(job)["held_out"], results_table(outcomes, [job])) == (
            expected[0]["held_out"],
            expected[1],
        )
        monkeypatch.undo()
    assert len(counts) == 117, "one read for each step"
    assert sorted(counts)[-2] <= 1, counts
