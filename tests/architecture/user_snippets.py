"""Twenty short programs as users write them, for the type checkers of `test_examples_types.py`."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import clients
from clients import (
    AnyJob,
    AsyncDistillClient,
    AsyncTeacherClient,
    DistillClient,
    DistillError,
    JobFile,
    JobHandle,
    JobSource,
    JobState,
    OnPolicyJob,
    ScoreQuery,
    TeacherClient,
    load_job,
    load_jobs,
    sweep_job,
)


def on_policy(student: str) -> OnPolicyJob:
    return OnPolicyJob(
        name="math",
        student=clients.StudentConfig(model=student, lora=clients.LoraConfig(rank=16)),
        teacher=clients.OnPolicyTeacher(address=["a:50052", "b:50052"], top_k=32),
        data=clients.DataConfig(
            path="train.jsonl", mix=(clients.MixConfig(path="b.jsonl", share=0.5),)
        ),
        method=clients.OnPolicyConfig(divergence="forward_kl", temperature=0.7),
        rollouts=clients.RolloutsConfig(),
        train=clients.TrainConfig(learning_rate=1e-5, prompts_per_step=8),
        eval=clients.EvalConfig(metric="exact_match"),
        checkpoint=clients.CheckpointConfig(every=10, keep=3),
        export=clients.ExportConfig(dtype="bfloat16"),
        track=clients.TrackConfig(wandb=clients.TrackerConfig(project="p")),
        resources=clients.ResourcesConfig(gpus=1),
        labels={"team": "math"},
        max_steps=100,
    )


def offline(store: Path) -> clients.OfflineJob:
    return clients.OfflineJob(
        student=clients.StudentConfig(model="m"),
        data=clients.OfflineData(path=str(store)),
        method=clients.OfflineConfig(type="offline"),
    )


def rl() -> clients.RLJob:
    return clients.RLJob(
        student=clients.StudentConfig(model="m"),
        data=clients.DataConfig(path="train.jsonl"),
        method=clients.RLConfig(type="rl"),
        reward=clients.RewardConfig(
            type="exact_match", length=clients.LengthPenalty(free_tokens=100, max_tokens=200)
        ),
        teacher=clients.RLTeacher(address="h:1"),
        anchor=clients.AnchorConfig(),
        eval=clients.SampledEvalConfig(samples=4, temperature=0.5),
    )


def sft() -> AnyJob:
    return clients.SFTJob(
        student=clients.StudentConfig(model="m"),
        data=clients.DataConfig(path="train.jsonl"),
        method=clients.SFTConfig(type="sft", train_on="all"),
        epochs=2.0,
    )


def capture() -> clients.CaptureJob:
    return clients.CaptureJob(
        teacher=clients.CaptureTeacher(model="t", top_k=32),
        data=clients.CaptureData(path="train.jsonl"),
        method=clients.CaptureConfig(type="capture", ray=clients.RayConfig()),
    )


def evaluation(models: Sequence[str]) -> list[clients.EvalJob]:
    return [
        clients.EvalJob(
            student=clients.EvaluatedModel(model=model),
            data=clients.DataConfig(path="test.jsonl"),
            method=clients.EvalMethod(type="eval", samples=8),
            reward=clients.RewardConfig(type="math"),
        )
        for model in models
    ]


def wrong_key() -> OnPolicyJob:
    """A type checker finds the wrong key and the wrong type; without one, the error names both."""
    return OnPolicyJob(
        student=clients.StudentConfig(modle="m"),  # type: ignore[call-arg]
        data=clients.DataConfig(path=3),  # type: ignore[arg-type]
    )


def from_a_dict(client: DistillClient, path: Path) -> JobHandle:
    return client.submit(
        {"student": {"model": "m"}, "data": {"path": path}, "train": {"learning_rate": 1e-5}}
    )


def from_a_file(client: DistillClient, path: Path) -> str:
    file: JobFile = load_job(path, ["max_steps=10"])
    return client.submit(file, upload=True, idempotency_key="k").id


def pipeline(client: DistillClient, path: str) -> list[JobState]:
    return [job.wait(timeout=60).state for job in client.submit_all(load_jobs(path))]


def grid(client: DistillClient, base: JobSource) -> Mapping[str, float]:
    changes = [
        {"train.learning_rate": rate, "seed": seed} for rate in (1e-5, 3e-5) for seed in (1, 2)
    ]
    jobs = client.submit_all(sweep_job(base, changes))
    return {job.name: job.wait().metrics["eval/kl"] for job in jobs}


def product(client: DistillClient, tables: dict[str, Any]) -> int:
    return len(client.submit_all([{**tables, "sweep": {"seed": [1, 2, 3]}}]))


def changed(job: OnPolicyJob, steps: int) -> OnPolicyJob:
    return job.model_copy(update={"max_steps": steps, "name": f"{job.name}-{steps}"})


def message(job: JobSource) -> str:
    try:
        return load_job(job).config.name
    except DistillError as error:
        return f"{error.field} {error.hint} {error.exit_code}"


def curve(job: JobHandle) -> list[tuple[int, float]]:
    return [(event.step, event.metrics["loss"]) for event in job.watch() if event.metrics]


async def at_once(jobs: Sequence[OnPolicyJob]) -> list[str]:
    async with AsyncDistillClient("localhost:50051", timeout=5) as client:
        handles = await asyncio.gather(*(client.submit(job, upload=True) for job in jobs))
        ended = await asyncio.gather(*(client.wait(job.id, timeout=3600.0) for job in handles))
        paths = [
            await client.pull(job.id, Path("out") / job.id, checkpoint="best") for job in ended
        ]
        return [str(path) for path in paths]


async def follow(client: AsyncDistillClient, job_id: str) -> bytes:
    async for event in client.watch(job_id, timeout=60):
        print(event.step, event.metrics.get("loss"))
    listed: list[JobHandle] = await client.list(state=JobState.RUNNING, limit=5)
    print([job.id for job in listed])
    return b"".join([chunk async for chunk in client.logs(job_id, tail_lines=5)])


def in_processes(client: DistillClient, ids: list[str]) -> list[JobState]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return [job.state for job in pool.map(client.get, ids)]


class Rows:
    """A data set of rows, for a DataLoader with workers that are started by spawn."""

    def __init__(self, teacher: TeacherClient, texts: list[list[int]]) -> None:
        self.teacher = teacher
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[float]:
        query = ScoreQuery(np.array(self.texts[index], np.int32), start=1, top_k=8)
        values: list[float] = self.teacher.score([query])[0].token_logprobs.tolist()
        return values


def copies(teacher: TeacherClient) -> tuple[TeacherClient, AsyncTeacherClient]:
    copied: TeacherClient = pickle.loads(pickle.dumps(teacher))
    return copied, AsyncTeacherClient(["a:1", "b:2"], patience_seconds=5.0)
