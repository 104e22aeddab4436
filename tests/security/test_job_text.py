"""S5 and S6: hostile job texts are refused quickly; accepted ones run no commands."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.config.file import MAX_BYTES as MAX_JOB_BYTES
from clients.config.file import load_job
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.store import JobStore
from distill_server.runners.local.runner import LocalRunner
from distill_server.scheduler import Policy
from protos.errors import InvalidInput
from tests.distill_server.conftest import eventually
from tests.distill_server.scripted_runner import SmallServer

MAX_SECONDS = 0.1
MAX_BYTES = 50 << 20
ALIASES = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9))
YAML = {
    "object": "student: !!python/object/apply:os.system ['touch canary']\n",
    "module": "student: !!python/module:antigravity\n",
    "tuple": "student: !!python/tuple [1, 2]\n",
    "alias bomb": ALIASES,
    "merge bomb": "a: &a {x: 1}\n" + "".join(f"b{n}: {{<<: *a}}\n" for n in range(99)),
    "flow depth": "a: " + "[" * 20_000,
    "closed depth": "a: " + "[" * 20_000 + "]" * 20_000,
    "block depth": "".join(f"{' ' * n}k:\n" for n in range(300)),
    "documents": "---\n" * 16_000,
    "long integer": "seed: " + "9" * 60_000,
    "sexagesimal": "seed: 1" + ":59" * 20_000,
    "null": "name: \0",
    "too large": "a: " + "x" * MAX_JOB_BYTES,
}
TOML = {
    "depth": "a = " + "[" * 20_000,
    "tables": "a = " + "{b=" * 20_000,
    "long integer": "seed = " + "9" * 60_000,
    "no key": "a = '''\n" + "a" + " " * 60_000 + "b\n'''",
    "no dots": "a = '''\n" + "a" * 60_000 + "\n'''",
    "dotted": ".".join("a" * 9000) + " = 1",
}


def measure_cost(action: Callable[[], object]) -> tuple[float, int]:
    """Return CPU seconds of the fastest of three runs, and peak bytes of memory."""
    seconds = []
    for _ in range(3):
        start_time = time.process_time()
        action()
        seconds.append(time.process_time() - start_time)
    tracemalloc.start()
    try:
        action()
        return min(seconds), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        *(pytest.param("yaml", text, id=f"yaml {name}") for name, text in YAML.items()),
        *(pytest.param("toml", text, id=f"toml {name}") for name, text in TOML.items()),
    ],
)
def test_hostile_files(
    suffix: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / f"job.{suffix}"
    job.write_text(text)

    def refuse_job() -> None:
        with pytest.raises(InvalidInput):
            load_job(job)

    seconds, peak = measure_cost(refuse_job)
    print(f"\n{len(text)} characters: {seconds * 1e3:.1f} ms, {peak >> 10} KiB")
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES
    assert [path.name for path in tmp_path.iterdir()] == [job.name]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 200_000, id="arrays"),
        pytest.param('{"student":' * 20_000, id="objects"),
        pytest.param('{"name":"' + "x" * (300 << 10) + '"}', id="too large"),
        pytest.param('{"seed":' + "9" * 200_000 + "}", id="long integer"),
        pytest.param('{"seed":1e999999999}', id="infinity"),
        pytest.param('{"student":{"model":"\\ud800"},"data":{"path":"x"}}', id="surrogate"),
        pytest.param('{"name":"a","name":"b"}', id="twice"),
        pytest.param("\0", id="null"),
        pytest.param("", id="empty"),
    ],
)
def test_hostile_json_to_the_server(text: str, tmp_path: Path) -> None:
    with open_database(tmp_path / "server.sqlite") as connection:
        (tmp_path / "runs").mkdir()
        store = JobStore(connection, on_change=lambda job_id: None)
        control = JobControl(store, tmp_path / "runs", wake=lambda: None)

        def refuse_job() -> None:
            with pytest.raises(InvalidInput) as caught:
                control.submit(text, "", "")
            assert len(caught.value.message) < 10_000

        seconds, peak = measure_cost(refuse_job)
    print(f"\n{len(text)} characters: {seconds * 1e3:.1f} ms, {peak >> 10} KiB")
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_tries_to_run_commands_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text of the job is a shell command. A server without preflight checks starts the real
    trainer.
    """
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    site = tmp_path / "site"
    site.mkdir()
    # If PYTHONPATH reached a trainer, Python would run this file first.
    (site / "sitecustomize.py").write_text(
        "import sys, pathlib\n"
        f"if 'student_trainer' in ' '.join(sys.orig_argv):\n"
        f"    pathlib.Path({str(canaries)!r}, 'path').touch()\n"
    )

    def shell_command(name: str) -> str:
        touch = f"touch {canaries}/{name}"
        return f"--help; {touch}; $({touch}) `{touch}` | {touch} && {touch}\n{touch}\n"

    values = {
        "name": shell_command("name")[:200],
        "student": {"model": shell_command("model"), "revision": shell_command("revision")},
        "data": {
            "path": shell_command("data") + ".jsonl",
            "template": shell_command("template") + "{prompt.__class__}",
            "prompt_column": shell_command("column"),
            "split": shell_command("split"),
        },
        "max_steps": 1,
    }
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(values))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    runs = tmp_path / "runs"
    runner = LocalRunner()
    jobs = SmallServer(runs, runner, Policy(retries=0))
    try:
        config = load_job(job_file).config
        job_id = jobs.control.submit(config.model_dump_json(), job_file.read_text(), "").id
        eventually(lambda: not jobs.look(), 120)
        job = jobs.store.job(job_id)
        for shim in runner._children.values():
            shim.wait(20)
    finally:
        jobs.close()
    assert job.state is JobState.FAILED
    # The trainer refused the job, so it was started.
    assert "no such file" in job.reason
    assert RunDirectory(runs / job.id).log_file(1).exists()
    assert list(canaries.iterdir()) == []
