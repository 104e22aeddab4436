"""The CPU threads, GPUs and slots that a server has, and their division among jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from clients.config.kinds import AnyJob
from clients.config.tables.teacher import TeacherLink
from protos.errors import InvalidInput


@dataclass(frozen=True)
class Share:
    """The CPU threads and GPUs that one job holds while it runs.

    `gpus` None means that GPUs are not divided among jobs: the job sees all of them. `slots` is 0
    for a teacher that the server runs.
    """

    cpus: int
    gpus: tuple[str, ...] | None = None
    slots: int = 1


@dataclass(frozen=True)
class Machine:
    """The resources for jobs. A job starts when a slot, its CPU threads and its GPUs are free.

    - slots: number of jobs that run at once.
    - cpus_per_job: default number of CPU threads of a job. A job has at least one thread for each
      of its processes.
    - cpus: number of CPU threads of all jobs together; 0 means slots * cpus_per_job.
    - gpus: names as in CUDA_VISIBLE_DEVICES; None means that GPUs are not divided among jobs.
    - has_teachers: True if the server starts the teachers of `teacher.model`, at most `slots` at
      once, on GPUs of `gpus`.
    - places_engines: True if the server finds GPUs for the engines of `rollouts.gpus`.
    """

    slots: int = 1
    cpus_per_job: int = 1
    cpus: int = 0
    gpus: tuple[str, ...] | None = None
    has_teachers: bool = True
    places_engines: bool = True

    @property
    def all_cpus(self) -> int:
        """The number of CPU threads of all jobs together."""
        return self.cpus or self.slots * self.cpus_per_job

    def require_room(self, job: AnyJob) -> None:
        """Raise InvalidInput if the job requests more than the whole machine has."""
        # Without --cpus, half of the machine's threads are for jobs; processes may use the other
        # half.
        threads = self.cpus or max(self.all_cpus, os.cpu_count() or 1)
        if (processes := job.processes) > threads:
            raise InvalidInput(
                f"{processes} processes need {processes} CPU threads, but the server has"
                f" {threads} for all jobs",
                field="train.processes",
                hint="use fewer processes, or start the server with a larger --cpus",
            )
        if (cpus := self._count_cpus(job)) > self.all_cpus:
            raise InvalidInput(
                f"the job requests {cpus} CPU threads, but the server has {self.all_cpus} for"
                f" all jobs",
                field="resources.cpus",
                hint="request fewer threads, or start the server with a larger --cpus",
            )
        if 0 < (job.resources.gpus or 0) < (needed_gpus := job.gpus) > processes:
            raise InvalidInput(
                f"the job requests {job.resources.gpus} GPUs, but its {processes} processes and"
                f" its rollout engines need {needed_gpus}",
                field="resources.gpus",
                hint="remove the key, or lower rollouts.gpus",
            )
        self._require_room_for_teacher(job)
        self._require_room_for_engines(job)
        if (gpus := self.gpus_of_job(job)) > len(self.gpus or ()):
            raise InvalidInput(
                f"the job requests {gpus} GPUs, but the server has {len(self.gpus or ())} for jobs",
                field="resources.gpus",
                hint="request fewer GPUs, or start the server with a larger --gpus",
            )

    def _require_room_for_teacher(self, job: AnyJob) -> None:
        teacher = job.started_teacher
        if teacher is None:
            return
        if not self.has_teachers:
            raise InvalidInput(
                "a server with --ray or --slurm starts no teachers",
                field="teacher.model",
                hint="start a distill-teacher, and set teacher.address",
            )
        job_gpus, teacher_gpus = self.gpus_of_job(job), teacher.gpus_of_model
        if self.gpus is not None and teacher_gpus and job_gpus + teacher_gpus > len(self.gpus):
            raise InvalidInput(
                f"the job needs {format_count(job_gpus, 'GPU')} and its teacher"
                f" {teacher_gpus} more, but the server has {len(self.gpus)} for jobs",
                field="teacher.model",
                hint="start the server with a larger --gpus, or set teacher.device = 'cpu'",
            )

    def _require_room_for_engines(self, job: AnyJob) -> None:
        if not self.places_engines and job.engine_gpus:
            raise InvalidInput(
                "a server with --slurm does not support separate GPUs for rollout engines",
                field="rollouts.gpus",
                hint="start distill-rollouts and set rollouts.address, or remove the key",
            )

    def gpus_for(self, teacher: TeacherLink, shares: Sequence[Share]) -> tuple[str, ...] | None:
        """Return free GPUs for a teacher; `shares` are the shares of running jobs and teachers.

        The result is None if GPUs are not divided. Raises LookupError, which names the missing
        resource, if too few GPUs are free.
        """
        if self.gpus is None:
            return None
        count, free_gpus = teacher.gpus_of_model, self._free_gpus(shares)
        if count > len(free_gpus):
            raise LookupError(
                f"the teacher needs {format_count(count, 'GPU')}; {len(free_gpus)} are free"
            )
        return tuple(free_gpus[:count])

    def allocate_share(self, job: AnyJob, shares: Sequence[Share]) -> Share | None:
        """Return a share for the job; None if too little is free. `shares` are the used shares."""
        if self.explain_lack(job, shares):
            return None
        cpus = self._count_cpus(job)
        if self.gpus is None:
            return Share(cpus)
        return Share(cpus, tuple(self._free_gpus(shares)[: self.gpus_of_job(job)]))

    def explain_lack(self, job: AnyJob, shares: Sequence[Share]) -> str:
        """Return a text about the resource that a job waits for; "" if the job can start.

        `shares` are the shares in use.
        """
        if sum(share.slots for share in shares) >= self.slots:
            slots = f"all {self.slots} slots are" if self.slots > 1 else "the only slot is"
            return f"{slots} in use"
        cpus, free_cpus = self._count_cpus(job), self.all_cpus - sum(share.cpus for share in shares)
        if cpus > free_cpus:
            requested_text = format_count(cpus, "CPU thread")
            return f"the job needs {requested_text}; {free_cpus} of {self.all_cpus} are free"
        gpus, free_gpus = self.gpus_of_job(job), len(self._free_gpus(shares))
        if self.gpus is not None and gpus > free_gpus:
            requested_text = format_count(gpus, "GPU")
            return f"the job needs {requested_text}; {free_gpus} of {len(self.gpus)} are free"
        return ""

    def _free_gpus(self, shares: Sequence[Share]) -> list[str]:
        used_gpus = {gpu for share in shares for gpu in share.gpus or ()}
        return [gpu for gpu in self.gpus or () if gpu not in used_gpus]

    def _count_cpus(self, job: AnyJob) -> int:
        requested_cpus = job.resources.cpus or min(self.cpus_per_job, self.all_cpus)
        # Each process gets at least one thread, unless the server has fewer threads.
        return max(requested_cpus, min(job.processes, self.all_cpus))

    def gpus_of_job(self, job: AnyJob) -> int:
        """Return the number of GPUs that the job holds while it runs; 0 if GPUs are not divided."""
        requested_gpus = job.resources.gpus
        if requested_gpus is None:
            return 0 if self.gpus is None else job.gpus
        return requested_gpus


ONE_JOB = Machine()
# The number of CPU threads of a cluster. The cluster counts its threads itself.
UNCOUNTED = sys.maxsize


def format_count(count: int, noun: str) -> str:
    """Format a number with its noun, such as `1 GPU` or `2 GPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def visible_gpus(count: int) -> tuple[str, ...]:
    """Return the names of the first `count` GPUs that this process may use.

    Raises InvalidInput if $CUDA_VISIBLE_DEVICES lists fewer GPUs. Without that variable the names
    are 0 to count - 1, and the existence of these GPUs is not checked.
    """
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(n) for n in range(count)] if visible_devices is None else visible_devices.split(",")
    )
    names = [name.strip() for name in names if name.strip()]
    if len(names) < count:
        raise InvalidInput(
            f"$CUDA_VISIBLE_DEVICES names {len(names)} GPUs, not {count}",
            field="--gpus",
            hint=f"use --gpus {len(names)} or fewer, or change the variable",
        )
    return tuple(names[:count])


def gpus_of_cluster(count: int) -> tuple[str, ...]:
    """Return `count` GPU names that are only counted: the cluster assigns the real GPUs."""
    return tuple(str(number) for number in range(count))
