"""A server with jobs that tell a story, for people who look at its pages: RUNS [JOBS] [PORT].

`python -m tests.distill_server.dashboard.seeded_site RUNS` fills an empty directory and serves it;
the program prints the address and the tokens. Trainers and teachers are scripted, and nothing
moves except the teachers' counters. JOBS (18 or more, by default 18) is the number of jobs; the
further ones are older and have ended. The answers that the pages must give:

- which seed of the sweep won: `lr-3e-5-seed-2` of the sweep `math-lr`;
- why the pipeline stopped: `rank-student` is out of memory, so `rank-exam` was cancelled;
- which checkpoint to take: step 300 of `notes-sft`, after which the held-out loss rises;
- what the student learned from: the answers in the preview of `notes-sft`;
- whether the teacher is the bottleneck: yes, `math-online` waits for it for 62% of its time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from clients.config.kinds import AnyJob, parse_job
from clients.data.preview import Preview, RecordPreview, TokenRun, TokenView
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from distill_server.dashboard.serve import Dashboard
from distill_server.jobs.database import open_database, transaction
from distill_server.jobs.preflight import accept_all
from distill_server.jobs.rows import NewJob
from distill_server.jobs.store import Change, JobStore
from distill_server.runners.interface import Outcome, Running
from distill_server.runners.machine import Machine, Share
from distill_server.scheduler import Policy
from distill_server.server import run_server
from protos import teacher_pb2, teacher_pb2_grpc
from protos.auth.access import read_tokens
from protos.rpc.server import ServerEndpoint
from tests.distill_server.dashboard.site import TOKENS
from tests.distill_server.scripted_runner import ScriptedRunner

MIN_JOBS = 18
_GPUS = tuple(str(number) for number in range(8))
_EVAL_EVERY = 50
_LEARNED = "Our opening hours are 9 to 17, and refunds take five working days."


class EndlessRunner(ScriptedRunner):
    """Every attempt runs until the server ends."""

    def start(self, run: RunDirectory, **arguments: Any) -> None:
        pass

    def poll(self, run: RunDirectory, attempt: int) -> Outcome:
        return Running()


class BusyTeacher(teacher_pb2_grpc.TeacherServicer):
    """A teacher whose counters grow with the time, and whose queue is full."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def GetInfo(self, request: Any, context: Any) -> teacher_pb2.TeacherInfo:
        seconds = time.monotonic() - self._started
        tokens = int(5200 * seconds + 400 * math.sin(seconds))
        tier = teacher_pb2.CacheTierLoad(
            name="memory", hits=int(90 * seconds), misses=int(210 * seconds)
        )
        return teacher_pb2.TeacherInfo(
            model="Qwen/Qwen2.5-7B-Instruct",
            fingerprint="f" * 64,
            vocab_size=152064,
            max_top_k=128,
            max_length=8192,
            dtype="bfloat16",
            engine="vllm",
            load=teacher_pb2.TeacherLoad(
                queued_tokens=48_000 + int(8000 * math.sin(seconds / 7)),
                active_streams=2,
                scored_tokens=tokens,
                forwards=int(3 * seconds),
                cache_tiers=[tier],
            ),
        )


def start_teacher() -> str:
    """Serve a BusyTeacher on a free port of this machine, and return its address."""
    server = grpc.server(ThreadPoolExecutor(2))
    teacher_pb2_grpc.add_TeacherServicer_to_server(BusyTeacher(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _TEACHERS.append(server)
    return f"127.0.0.1:{port}"


_TEACHERS: list[grpc.Server] = []


class Seeds:
    """Writes jobs as a server would have written them; `clock` is the Unix time of its events."""

    def __init__(self, runs: Path, store: JobStore) -> None:
        self.runs = runs
        self.store = store
        self.clock = time.time()
        self._random = random.Random(0)

    def add(self, name: str, kind: str = "on_policy", days: float = 0.0, **values: Any) -> str:
        """Queue a job that was submitted `days` ago, and return its id."""
        owner, after = values.pop("owner", "ann"), values.pop("dependencies", ())
        document = {
            "name": name,
            "student": {"model": "Qwen/Qwen2.5-0.5B"},
            "data": {"path": "s3://team/math/train.jsonl"},
            "method": {"type": kind},
            "max_steps": 500,
            **values,
        }
        if kind in ("eval", "rl"):
            document |= {"reward": {"type": "math"}}
        if kind == "capture":
            del document["student"]
        if kind in ("capture", "eval"):
            del document["max_steps"]
        config = parse_job(json.dumps(document))
        job_id = f"{kind.replace('_', '-')}-{name}"
        self.clock = time.time() - days * 86400
        self.store.insert_job(NewJob(job_id, config, config, "", after, owner))
        if days < 3:
            RunDirectory.create(self.runs / job_id, config, self._text_of(config), durable=False)
        return job_id

    def start(self, job_id: str, gpus: int = 1, seconds: float = 40.0) -> None:
        self.clock += seconds
        share = next(self._shares) if gpus else Share(2, ())
        job = self.store.job(job_id)
        self.store._db.execute(
            "UPDATE attempts SET cpus = ?, gpus = ? WHERE job_id = ?",
            (share.cpus, ",".join(share.gpus or ()), job_id),
        )
        self.store.write(job.id, Change(JobState.PREPARING, phase="loading the student"))
        self.clock += seconds
        self.store.write(job.id, Change(JobState.RUNNING, phase="training"))

    _shares: Iterator[Share] = (Share(4, (gpu,)) for gpu in itertools.cycle(_GPUS[:4]))

    def train(
        self,
        job_id: str,
        steps: int,
        end: float = 0.2,
        *,
        every: int = 5,
        wait: float = 0.1,
        turn: int = 0,
    ) -> None:
        """Make steps whose KL falls to `end`; the held-out value rises again after step `turn`."""
        kind = self.store.job(job_id).kind
        for step in range(every, steps + 1, every):
            self.clock += 2.0 * every
            decay = math.exp(-step / 120)
            value = end + 1.4 * decay + self._random.gauss(0, 0.02)
            metrics = {"loss": value, "time/step": 2.0}
            metrics |= {"time/teacher_wait": 2.0 * wait} if wait else {}
            metrics |= {"tokens": 8192.0, "tokens_per_sec": 4096.0, "grad_norm": 0.4 + decay}
            metrics |= {
                "time/learn": 2.0 * (1 - wait) * 0.6,
                "time/rollout": 2.0 * (1 - wait) * 0.4,
            }
            name = {"sft": "cross_entropy", "rl": "reward/mean"}.get(kind, "kl/teacher")
            metrics[name] = 1.6 - value if kind == "rl" else value
            if step % _EVAL_EVERY == 0:
                rise = 0.0012 * max(0, step - turn) if turn else 0.0
                held_out = "eval/cross_entropy" if kind == "sft" else "eval/kl"
                metrics[held_out] = end + 0.05 + 1.3 * decay + rise
                metrics["eval/accuracy"] = max(0.0, 0.72 - end - 0.5 * decay)
            self.store.write(job_id, Change(step=step, metrics=metrics))

    def end(self, job_id: str, state: JobState = JobState.SUCCEEDED, reason: str = "") -> None:
        self.clock += 30.0
        self.store.write(job_id, Change(state, reason=reason, phase=""))

    def keep_checkpoints(self, job_id: str, *steps: int) -> None:
        for step in steps:
            folder = RunDirectory(self.runs / job_id).checkpoint(step)
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(bytes(2048))

    def write_log(self, job_id: str, *lines: str) -> None:
        log = RunDirectory(self.runs / job_id).log_file(1)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"{line}\n" for line in lines))

    def write_samples(self, job_id: str, step: int, *samples: Mapping[str, Any]) -> None:
        folder = RunDirectory(self.runs / job_id).samples
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / f"step-{step:06}.jsonl").write_text(text)

    @staticmethod
    def _text_of(config: AnyJob) -> str:
        return f'name = "{config.name}"\n'


def tell_story(seeds: Seeds, teachers: list[str]) -> None:
    """Write the 18 jobs that the tasks are about."""
    online = {"teacher": {"address": teachers}}
    label = "train.learning_rate"
    ends = {"1e-5": (0.31, 0.29, 0.33), "3e-5": (0.16, 0.11, 0.18), "1e-4": (0.42, 0.55, 0.47)}
    for rate, values in ends.items():
        for seed, end in enumerate(values, start=1):
            labels = {"sweep": "math-lr", label: rate, "seed": str(seed), "project": "math"}
            train = {"learning_rate": float(rate)}
            name = f"lr-{rate}-seed-{seed}"
            job = seeds.add(name, days=1.5, labels=labels, train=train, seed=seed, **online)
            seeds.start(job)
            seeds.train(job, 500, end)
            seeds.end(job)
            seeds.keep_checkpoints(job, 250, 500)
    rank = {"labels": {"project": "rank"}, "owner": "ben"}
    rows = seeds.add("rank-rows", "capture", 0.9, teacher={"address": teachers[0]}, **rank)
    seeds.start(rows)
    seeds.store.write(
        rows, Change(step=900, max_steps=900, metrics={"bytes": 3.1e9, "tokens": 4e6})
    )
    seeds.end(rows)
    offline = {"data": {"path": f"@{rows}/store"}, "dependencies": [rows]}
    student = seeds.add("rank-student", "offline", 0.8, **offline, **rank)
    seeds.start(student)
    seeds.train(student, 120, 0.4)
    out_of_memory = (
        "rank 0: CUDA out of memory at 79.2 of 80 GiB; halve train.tokens_per_micro_batch"
    )
    seeds.write_log(student, *(f"step {n}  loss 0.5" for n in range(1, 121)), out_of_memory)
    seeds.end(student, JobState.FAILED, out_of_memory)
    exam = {"student": {"model": f"@{student}/export"}, "dependencies": [student]}
    exam_job = seeds.add("rank-exam", "eval", 0.8, **exam, **rank)
    reason = f"job {student}, which must succeed first, is FAILED"
    seeds.end(exam_job, JobState.CANCELLED, reason)
    notes = seeds.add(
        "notes-sft",
        "sft",
        0.4,
        data={"path": "/data/support-notes.jsonl", "eval_path": "/data/support-held-out.jsonl"},
        labels={"project": "support"},
        owner="cleo",
    )
    seeds.start(notes)
    seeds.train(notes, 500, 0.25, turn=300, wait=0.0)
    seeds.end(notes)
    seeds.keep_checkpoints(notes, 100, 200, 300, 400, 500)
    write_preview(seeds.runs / notes)
    busy = seeds.add("math-online", days=0.02, labels={"project": "math"}, max_steps=2000, **online)
    seeds.start(busy)
    seeds.train(busy, 700, 0.2, wait=0.62)
    sample = {"prompt": "What is 7 * 6?", "completion": "7 * 6 = 42", "reward": 1.0}
    seeds.write_samples(busy, 700, sample, {**sample, "completion": "It is 43.", "reward": 0.0})
    reward = seeds.add("math-rl", "rl", 0.03, labels={"project": "math"}, owner="ben")
    seeds.start(reward)
    seeds.train(reward, 260, 0.5)
    for name in ("math-next", "rank-retry", "support-long-name-of-a-job-that-no-column-can-hold"):
        seeds.add(name, days=0.01, owner="dan", resources={"gpus": 4}, **online)


def write_preview(run: Path) -> None:
    texts = tuple(f"{word} " for word in _LEARNED.split())
    runs = (
        TokenRun("context", ("<|user|>", "When ", "are ", "you ", "open?", "<|assistant|>")),
        TokenRun("learned", texts),
        TokenRun("end", ("<|end|>",)),
    )
    view = TokenView("student", 6 + len(texts) + 1, len(texts) + 1, runs)
    record = RecordPreview("/data/support-notes.jsonl:1", "", (view,), ())
    facts = (("records", "1,204 used, 3 left out (empty answer)"), ("learned tokens", "38%"))
    preview = Preview("sft", ("3 records are left out: the answer is empty",), facts, (record,))
    RunDirectory(run).preview.write_text(preview.to_json())


def add_history(seeds: Seeds, count: int) -> None:
    """Write older jobs that have ended, with a few steps each."""
    outcomes = (JobState.SUCCEEDED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    people = ("ann", "ben", "cleo", "dan")
    for number in range(count, 0, -1):
        kind = ("on_policy", "sft", "rl")[number % 3]
        labels = {"project": ("math", "rank", "support")[number % 3], "week": str(number // 200)}
        name, days = f"nightly-{number:05}", 3 + number / 50
        owner = people[number % 4]
        job = seeds.add(name, kind, days, labels=labels, owner=owner, max_steps=100)
        seeds.start(job)
        seeds.train(job, 100, 0.2 + number % 7 / 20, every=25)
        state = outcomes[number % 4]
        if state is JobState.CANCELLED:
            seeds.store.write(job, Change(JobState.CANCELLING))
        seeds.end(job, state, "the loss is not finite" if state is JobState.FAILED else "")


def seed(runs: Path, count: int = MIN_JOBS) -> None:
    """Fill the directory `runs` of a server with `count` jobs, and start their teachers."""
    runs.mkdir(parents=True)
    with open_database(runs / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        store = JobStore(connection, lambda job_id: None, now=lambda: seeds.clock)
        seeds = Seeds(runs, store)
        with transaction(connection):
            add_history(seeds, count - MIN_JOBS)
            tell_story(seeds, [start_teacher(), start_teacher()])


def serve(runs: Path, port: int) -> None:
    """Serve the directory; print the bound port of gRPC and the address of the pages."""
    lines = "\n".join(f"{role} {token}" for role, token in TOKENS.items())
    os.environ["DISTILL_TOKENS"] = lines
    asyncio.run(
        run_server(
            runs,
            endpoint=ServerEndpoint(tokens=read_tokens(None)),
            runner=EndlessRunner(),
            policy=Policy(Machine(slots=4, cpus=16, gpus=_GPUS[:4])),
            preflight=accept_all,
            on_ready=lambda bound: print(bound, flush=True),
            dashboard=Dashboard(port, on_ready=lambda url: print(url, flush=True)),
        )
    )


def main(runs: str, count: str = str(MIN_JOBS), port: str = "0") -> None:
    seed(Path(runs), int(count))
    for role, token in TOKENS.items():
        print(f"token of role {role}: {token}", file=sys.stderr)
    serve(Path(runs), int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
