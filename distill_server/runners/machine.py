"""What the server's machine has for jobs, and what each of them gets of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from clients.config.kinds import AnyJob, processes_of
from protos.errors import InvalidInput


@dataclass(frozen=True)
class Share:
    """What one job holds while it runs. `gpus` None: they are not divided, it sees all."""

    cpus: int
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Machine:
    """Jobs run while there is a slot, CPU threads and GPUs for them.

    `cpus_per_job`: threads of a job that asks for none; `cpus` of all jobs, 0: enough for every
    slot. `gpus`: as CUDA_VISIBLE_DEVICES names them; None: they are not divided among jobs.
    """

    slots: int = 1
    cpus_per_job: int = 1
    cpus: int = 0
    gpus: tuple[str, ...] | None = None

    @property
    def all_cpus(self) -> int:
        return self.cpus or self.slots * self.cpus_per_job

    def require_room(self, job: AnyJob) -> None:
        """Raises InvalidInput for a job that asks for more than there ever is."""
        if (cpus := self._cpus_of(job)) > self.all_cpus:
            raise InvalidInput(
                f"the job asks for {cpus} CPU threads, the server has {self.all_cpus} for all jobs",
                field="resources.cpus",
                hint="ask for fewer, or start the server with more --cpus",
            )
        if (gpus := self._gpus_of(job)) > len(self.gpus or ()):
            raise InvalidInput(
                f"the job asks for {gpus} GPUs, the server has {len(self.gpus or ())} for jobs",
                field="resources.gpus",
                hint="ask for fewer, or start the server with more --gpus",
            )

    def share(self, job: AnyJob, held: Sequence[Share]) -> Share | None:
        """What the job gets beside those who hold theirs; None: not now."""
        cpus = self._cpus_of(job)
        if len(held) >= self.slots or sum(other.cpus for other in held) + cpus > self.all_cpus:
            return None
        if self.gpus is None:
            return Share(cpus)
        taken = {gpu for other in held for gpu in other.gpus or ()}
        free = [gpu for gpu in self.gpus if gpu not in taken]
        wanted = self._gpus_of(job)
        return Share(cpus, tuple(free[:wanted])) if wanted <= len(free) else None

    def _cpus_of(self, job: AnyJob) -> int:
        return job.resources.cpus or min(self.cpus_per_job, self.all_cpus)

    def _gpus_of(self, job: AnyJob) -> int:
        asked = job.resources.gpus
        if asked is None:
            return 0 if self.gpus is None else processes_of(job)
        return asked


ONE_JOB = Machine()


def visible_gpus(count: int) -> tuple[str, ...]:
    """The first `count` GPUs that this process may use; raises InvalidInput for too few."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if listed is None else listed.split(",")
    names = [name.strip() for name in names if name.strip()]
    if len(names) < count:
        raise InvalidInput(
            f"$CUDA_VISIBLE_DEVICES names {len(names)} GPUs, not {count}",
            field="--gpus",
            hint="give fewer, or change the variable",
        )
    return tuple(names[:count])


def gpus_of_cluster(count: int) -> tuple[str, ...]:
    """So many GPUs to count by; the cluster says which they are."""
    return tuple(str(number) for number in range(count))
