"""The record for the dashboard's page of the machine: resources, their holders and the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from clients.jobs.job import JobState
from distill_server.jobs.store import JobStore
from distill_server.places import Places
from distill_server.runners.local.usage import Gpu
from distill_server.runners.machine import Share
from distill_server.teachers.started import TeacherProcess

_MAX_QUEUED = 100


def machine_record(
    store: JobStore, places: Places, teachers: Iterable[TeacherProcess], gpus: Sequence[Gpu]
) -> dict[str, Any]:
    """Return the use of the machine as a JSON record.

    - capacity: the result of `Places.capacity`.
    - holders: the active jobs (`id`, `name`, `owner`) and the teachers of this server (`name`).
      Each has `state`, `since` (Unix time of the start), `slots`, `cpus`, and `gpus` (names, null
      if the server does not divide them).
    - queue: the first 100 queued jobs, each with `id`, `name`, `owner`, `queued_at` (Unix time) and
      the keys of `Places.describe`.
    - gpus: the GPUs of the server's machine.
    """
    holders = []
    for job_id, share in store.shares_by_job().items():
        job = store.job(job_id)
        holders.append(
            {
                **{"id": job.id, "name": job.name, "owner": job.owner, "state": job.state},
                **{"since": job.started_at, **_share_record(share)},
            }
        )
    for teacher in teachers:
        name, since = teacher.record.link.model or teacher.key, teacher.since
        holders.append(
            {"name": name, "state": teacher.state, "since": since, **_share_record(teacher.share)}
        )
    queue = store.in_state(JobState.QUEUED, limit=_MAX_QUEUED)
    return {
        "capacity": places.capacity(),
        "holders": holders,
        "queue": [
            {
                **{"id": job.id, "name": job.name, "owner": job.owner},
                **{"queued_at": store.queued_at(job.id), **places.describe(job)},
            }
            for job in queue
        ],
        "gpus": [asdict(gpu) for gpu in gpus],
    }


def _share_record(share: Share) -> dict[str, Any]:
    return {"slots": share.slots, "cpus": share.cpus, "gpus": share.gpus}
