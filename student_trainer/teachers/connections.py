"""The teachers of a job: connected, asked what they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from clients.config.kinds import AnyTraining
from clients.preflight.teachers import field_of, label_of, services_of
from clients.teacher.client import TeacherClient, TeacherInfo

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
    addresses = services_of(config)
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
                    field=field_of(name),
                )
            )
            for name, address in addresses.items()
        }
        yield {
            name: Connection(client, client.info(), label_of(name))
            for name, client in clients.items()
        }
