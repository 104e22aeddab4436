"""The teachers of a job: connected, asked what they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from clients.config import JobConfig
from clients.offline_config import OfflineJob
from clients.rl_config import RLJob
from clients.teacher_client import TeacherClient, TeacherInfo

AnyTraining = JobConfig | OfflineJob | RLJob
_MIB = 1 << 20


@dataclass(frozen=True)
class Connection:
    """A teacher service that answered. `label` is what people are told: `teacher math`."""

    client: TeacherClient
    info: TeacherInfo
    label: str


@contextmanager
def connect(config: AnyTraining) -> Iterator[Mapping[str, Connection]]:
    """Every teacher of the job by its name; raises Unavailable for one that does not answer."""
    addresses = config.teacher_addresses
    if config.teacher is None:
        yield {}
        return
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                TeacherClient(
                    address,
                    patience_seconds=config.teacher.patience_seconds,
                    max_prefetch_bytes=config.teacher.prefetch_mib * _MIB // len(addresses),
                    field=f"teachers.{name}" if name else "teacher.address",
                )
            )
            for name, address in addresses.items()
        }
        yield {
            name: Connection(client, client.info(), f"teacher {name}".strip())
            for name, client in clients.items()
        }
