"""Responses of the dashboard's port: pages of jobs, streams of events and logs, teachers."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clients.config.on_policy import OnPolicyJob, OnPolicyTeacher
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.data.preview import MAX_BYTES, Preview
from clients.runs.directory import RunDirectory
from distill_server.jobs.database import open_database
from distill_server.jobs.store import JobStore
from protos.rpc.ports import free_ports
from tests.distill_server.conftest import eventually, job_config
from tests.distill_server.dashboard.site import TOKENS, Site
from tests.documents import blocks
from tests.security.processes import environment, teacher

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"
MANY = 10_000


def test_the_command_of_the_document(tmp_path: Path) -> None:
    """Run with other ports."""
    (block,) = blocks("docs/dashboard.md", "dashboard")
    (command,) = block.commands
    assert command.endswith(" --dashboard 8080")
    words = [sys.executable, "-m", "distill_server", *command.split()[1:-1], "0", "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as process:
        assert process.stdout is not None
        _, line = process.stdout.readline(), process.stdout.readline()
        with urllib.request.urlopen(line.removeprefix("dashboard at ").strip()) as answer:
            assert b"<title>distill</title>" in answer.read()
        process.terminate()
        assert process.wait(20) == 0


def test_the_command_behind_a_proxy(tmp_path: Path) -> None:
    (block,) = blocks("docs/dashboard.md", "proxy")
    (command,) = block.commands
    (tmp_path / "tokens").write_text(f"read {TOKENS['read']}\n")
    (tmp_path / "tokens").chmod(0o600)
    (port,) = free_ports(1)
    words = command.replace(" 8080 ", f" {port} ").split()[1:]
    with subprocess.Popen(
        [sys.executable, "-m", "distill_server", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        _, line = process.stdout.readline(), process.stdout.readline()
        assert line == "dashboard at https://example.org/distill/\n"
        for host, status in (("example.org", 200), ("other.example", 403)):
            with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                headers = {"Host": host, "Authorization": f"Bearer {TOKENS['read']}"}
                connection.request("GET", "/api/jobs", headers=headers)
                assert connection.getresponse().status == status
        process.terminate()
        assert process.wait(20) == 0


def test_a_search_is_for_every_word_of_id_name_and_state(site: Site) -> None:
    """Case-insensitive; SQL wildcards match only themselves."""
    ids = [site.submit(name=f"fail_at=1 {name}", max_steps=1) for name in ("Al%pha", "be_ta")]
    eventually(lambda: all(site.job(job)["state"] == "FAILED" for job in ids))

    def search_ids(search: str, state: str = "") -> set[str]:
        query = urllib.parse.urlencode({"search": search, "state": state})
        answer = site.ask(f"/api/jobs?{query}").json()
        assert sum(answer["counts"].values()) >= len(answer["jobs"])
        return {job["id"] for job in answer["jobs"]} & set(ids)

    assert search_ids("") == search_ids("fail") == search_ids("on-policy FAILED") == set(ids)
    assert search_ids("al%PHA") == search_ids(f"{ids[0]} alpha".replace("alpha", "l%p")) == {ids[0]}
    assert search_ids("e_t") == search_ids("be_ta", "FAILED") == {ids[1]}
    assert search_ids("al_pha") == search_ids("%") - {ids[0]} == search_ids("' OR 1 --") == set()
    assert search_ids("be_ta", "RUNNING") == search_ids("be_ta al%pha") == set()
    answer = site.ask(f"/api/jobs?search={'x' * 101}")
    assert (answer.status, answer.json()["error"]["field"]) == (400, "search")


def test_the_list_of_jobs_is_told_as_it_changes(site: Site) -> None:
    messages = site.messages("/api/events?search=listed")
    assert next(messages)[2]["jobs"] == []
    job = site.submit(name="pause=0.05 listed", max_steps=150)
    site.submit(name="another", max_steps=1)
    steps = []
    for kind, _, page in messages:
        assert kind == "page"
        assert {record["id"] for record in page["jobs"]} <= {job}
        steps += [record["step"] for record in page["jobs"]]
        if len(set(steps)) > 3:
            # 0.05 s a step, and more where the machine is busy.
            assert page["jobs"][0]["seconds_left"] > 0.05 * (150 - steps[-1]) * 0.9
            break
    assert steps == sorted(steps)
    messages.close()


@pytest.mark.slow
def test_ten_thousand_jobs_are_paged(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    ids = [f"job-{number:05}" for number in range(MANY)]
    with open_database(runs / "server.sqlite") as connection:
        fill(connection, ids)
    site = make_site()
    listed_ids: list[str] = []
    for _ in range(MANY):
        answer = site.ask(f"/api/jobs?offset={len(listed_ids)}")
        assert len(answer.body) < 100_000
        page = answer.json()
        assert page["counts"]["SUCCEEDED"] == MANY
        if not page["jobs"]:
            break
        listed_ids += [job["id"] for job in page["jobs"]]
    assert listed_ids == ids[::-1]
    assert site.ask("/api/jobs?state=FAILED").json()["jobs"] == []
    assert [job["id"] for job in site.ask("/api/jobs?sort=submitted").json()["jobs"]] == ids[:50]
    for wrong in ("state=NOSUCH", "sort=nothing", "offset=-1"):
        assert site.ask(f"/api/jobs?{wrong}").status == 400


def fill(connection: sqlite3.Connection, ids: list[str]) -> None:
    """Insert ended jobs as copies of the first one: ten thousand commits would take long."""
    JobStore(connection, on_change=lambda _: None).add(ids[0], job_config(), "")
    connection.execute("UPDATE jobs SET state = 'SUCCEEDED'")
    row = dict(connection.execute("SELECT * FROM jobs").fetchone())
    columns = ", ".join(row)
    rows = [{**row, "id": job, "number": n, "place": n} for n, job in enumerate(ids[1:], 2)]
    connection.execute("BEGIN")
    marks = ", ".join(f":{name}" for name in row)
    connection.executemany(f"INSERT INTO jobs ({columns}) VALUES ({marks})", rows)
    connection.execute("COMMIT")


def test_a_reader_that_comes_back_gets_each_event_once(site: Site) -> None:
    job = site.submit(name="pause=0.02", max_steps=40)
    path = f"/api/jobs/{job}/events"
    seqs: list[int] = []
    last_id = ""
    while site.job(job)["state"] != "SUCCEEDED" or seqs[-1] < site.job(job)["last_seq"]:
        messages = site.messages(path, after=last_id)
        if not last_id:
            assert next(messages)[0] == "extremes"
        kind, last_id, events = next(messages)
        assert kind == "steps"
        seqs += events["seq"]
    assert seqs == list(range(1, len(seqs) + 1))
    assert site.ask(path, headers={"Last-Event-ID": str(len(seqs) + 1)}).status == 400
    assert site.ask(path, headers={"Last-Event-ID": "x"}).status == 400


def test_a_log_goes_on_where_its_reader_was(site: Site) -> None:
    job = site.submit(name="pause=0.02", max_steps=30)
    path = f"/api/jobs/{job}/log?attempt=1"
    eventually(lambda: site.job(job)["step"] > 1)
    first_message = next(site.messages(path))
    assert first_message[0] == "text"
    later_messages = list(site.messages(path, after=first_message[1]))
    assert later_messages[-1][0] == "over"
    log_text = first_message[2] + "".join(
        data for kind, _, data in later_messages if kind == "text"
    )
    assert log_text == (site.runs / job / "logs" / "attempt-1" / "rank-0.log").read_text()
    kind, _, fault = next(site.messages(f"/api/jobs/{job}/log?attempt=7"))
    assert (kind, fault["code"]) == ("fault", "NOT_FOUND")


def test_samples_are_read_as_far_as_they_are_whole(site: Site) -> None:
    job = site.submit(max_steps=1)
    path = f"/api/jobs/{job}/samples"
    assert site.ask(path).json() == {"steps": []}
    samples = site.runs / job / "samples"
    samples.mkdir()
    lines = [json.dumps({"prompt": f"<b>{n}</b>", "answer": n}) for n in range(3)]
    (samples / "step-000050.jsonl").write_text("\n".join([*lines, "[1]", '{"cut": "of']))
    (samples / "step-000060.jsonl").write_text('{"reward": NaN, "logprobs": [-Infinity, -0.5]}\n')
    (samples / "step-000100.jsonl").symlink_to("/etc/passwd")
    (samples / "notes.txt").write_text("x")
    assert site.ask(path).json() == {"steps": [100, 60, 50]}
    returned_samples = site.ask(f"{path}/50").json()["samples"]
    assert site.ask(f"/api/jobs/{job}/evaluation").json() == {"models": None}
    results = RunDirectory(site.runs / job).evaluation
    results.mkdir()
    for text, models in (
        ('{"models": [{"model": "a", "gain": NaN}]}', [{"model": "a", "gain": "NaN"}]),
        ("[", None),
    ):
        (results / "result.json").write_text(text)
        assert site.ask(f"/api/jobs/{job}/evaluation").json() == {"models": models}
    assert returned_samples == [json.loads(line) for line in lines]
    [values] = site.ask(f"{path}/60").json()["samples"]
    assert values == {"reward": "NaN", "logprobs": ["-Infinity", -0.5]}
    assert site.ask(f"{path}/100").status == 404
    assert site.ask(f"{path}/7").status == 404


def test_a_preview_is_sent_if_it_is_valid(site: Site) -> None:
    job = site.submit(max_steps=1)
    path, file = f"/api/jobs/{job}/preview", site.runs / job / "preview.json"
    assert site.ask(path).json() == {"preview": None}
    preview = Preview("sft", ("<b>",), (("records", "3"),), ())
    file.write_text(preview.to_json())
    expected = {"method": "sft", "warnings": ["<b>"], "facts": [["records", "3"]], "records": []}
    assert site.ask(path).json() == {"preview": expected}
    file.write_text('{"method": 7}')
    assert site.ask(path).json() == {"preview": None}
    file.write_text(preview.to_json() + " " * MAX_BYTES)
    warning = "the preview has more than 512 KiB: distill report shows it"
    assert site.ask(path).json()["preview"]["warnings"] == [warning]
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert site.ask(path).json() == {"preview": None}


@pytest.mark.parametrize("name", ["../server.sqlite", "%2e%2e%2fserver.sqlite", "..", "%00"])
def test_names_lead_to_jobs_and_nowhere_else(site: Site, name: str) -> None:
    for path in (f"/api/jobs/{name}", f"/api/jobs/{name}/samples", f"/{name}", f"//{name}"):
        assert site.ask(path).status in (400, 404), path


def test_a_dead_teacher_is_told_and_holds_up_nobody(site: Site, tmp_path: Path) -> None:
    with teacher(tmp_path / "teacher.log") as live_teacher:
        for address in (live_teacher.address, "127.0.0.1:1"):
            config = OnPolicyJob(
                student=StudentConfig(model="tiny"),
                data=DataConfig(path="prompts.jsonl"),
                teacher=OnPolicyTeacher(address=address),
                name="pause=0.1",
                max_steps=1000,
            )
            site.submit(config)
        records: dict[str, dict[str, object]] = {}

        def has_both() -> bool:
            # Jobs of other tests may have teachers, too.
            teacher_records = site.ask("/api/teachers").json()["teachers"]
            records.update({record["address"]: record for record in teacher_records})
            return "load" in records.get(live_teacher.address, {}) and "127.0.0.1:1" in records

        eventually(has_both)
    assert set(records[live_teacher.address]) == {
        *("address", "jobs", "waiting", "info", "load", "at")
    }
    assert "cannot reach" in str(records["127.0.0.1:1"]["fault"])
    # The pages of jobs do not wait for teachers.
    assert site.ask("/api/jobs").status == 200


def test_a_teacher_that_the_server_runs_is_told(make_site: Callable[..., Site]) -> None:
    site = make_site(slots=1)
    job_id = site.submit(
        OnPolicyJob(
            student=StudentConfig(model="tiny"),
            data=DataConfig(path="prompts.jsonl"),
            teacher=OnPolicyTeacher(model="vocab=50", engine="fake"),
            name="pause=0.1",
            max_steps=1000,
        )
    )
    teachers: list[dict[str, Any]] = []

    def is_reached() -> bool:
        teachers[:] = site.ask("/api/teachers").json()["teachers"]
        return len(teachers) == 1 and "load" in teachers[0]

    eventually(is_reached)
    eventually(lambda: is_reached() and list(teachers[0]["jobs"]) == [job_id])
    process = teachers[0]["process"]
    assert (process["model"], process["state"], process["attempt"]) == ("vocab=50", "READY", 1)
    machine = site.ask("/api/machine").json()
    assert {holder["name"]: holder["slots"] for holder in machine["holders"]} == {
        **{"pause=0.1": 1, "vocab=50": 0}
    }
    queued_id = site.submit(name="pause=0.1 second", max_steps=9)
    eventually(lambda: site.ask("/api/machine").json()["queue"])
    [queued] = site.ask("/api/machine").json()["queue"]
    assert (queued["id"], queued["place"]) == (queued_id, 1)
    assert "slot" in queued["why"]


def test_prometheus_reads_what_the_server_did(make_site: Callable[..., Site]) -> None:
    site = make_site()
    succeeded_id = site.submit(max_steps=1)
    failed_id = site.submit(name="crash_at=2 every=100", max_steps=3)
    eventually(lambda: site.job(succeeded_id)["state"] == "SUCCEEDED")
    eventually(lambda: site.job(failed_id)["state"] == "FAILED")

    def scrape() -> dict[str, dict[tuple[str, ...], float]]:
        return {
            family.name: {tuple(s.labels.values()): s.value for s in family.samples}
            for family in text_string_to_metric_families(site.ask("/metrics").body.decode())
            if not family.name.startswith("process_")
        }

    # A scrape starts the measurement of the disk, and a later one has its result.
    eventually(lambda: "distill_server_disk_bytes" in scrape())
    families = scrape()
    jobs = families["distill_server_jobs"]
    assert {state: int(count) for (state,), count in jobs.items() if count} == {
        "SUCCEEDED": 1,
        "FAILED": 1,
    }
    assert families["distill_server_attempts"] == {(): 3}
    assert families["distill_server_retries"] == {(): 1}
    assert families["distill_server_slots"] == {(): 4}
    assert families["distill_server_queue_seconds"] == {(): 0}
    ended_jobs = families["distill_server_ended_jobs"]
    assert ended_jobs == {("CANCELLED",): 0, ("FAILED",): 1, ("SUCCEEDED",): 1}
    assert families["distill_server_waiting_jobs"] == {(): 0}
    assert families["distill_server_silent_seconds"] == {(): 0}
    assert set(families["distill_server_teachers"].values()) == {0}
    usage = shutil.disk_usage(site.runs)
    assert families["distill_server_disk_bytes"] == {(): usage.total}
    assert 0 < families["distill_server_disk_free_bytes"][()] <= usage.total
    documented = re.findall(
        r"^\| `(distill_server_\w+?)(?:_total)?` \|", DOCUMENT.read_text(), re.M
    )
    assert set(documented) == set(families)


def test_what_is_not_found_says_so(site: Site) -> None:
    answer = site.ask("/api/jobs/no-such-job")
    assert answer.status == 404
    assert "no-such-job" in answer.json()["error"]["message"]
    assert site.ask("/api/nothing").json()["error"]["code"] == "NOT_FOUND"
