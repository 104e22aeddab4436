"""Connections to the teacher services of a job. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from clients.config.tables.job import TrainingJob
from clients.preflight.teachers import field_of, label_of, services_of
from clients.teacher.client import TeacherClient, TeacherInfo

_MIB = 1 << 20


@dataclass(frozen=True)
class Connection:
    """A connected teacher service. label: its name in messages, such as `teacher math`."""

    client: TeacherClient
    info: TeacherInfo
    label: str

    def narrowed_vocab_size(self, vocab_size: int) -> int | None:
        """Return `vocab_size` if the teacher has more logits; otherwise None, which selects all
        logits.
        """
        return vocab_size if vocab_size < self.info.vocab_size else None


@contextmanager
def connect(config: TrainingJob) -> Iterator[Mapping[str, Connection]]:
    """Connect to every teacher of the job; yields connections by teacher name.

    The name of a single teacher is ""; the mapping is empty if the job needs no teacher. Raises
    Unavailable if a teacher does not answer, WrongState if the addresses of one teacher serve
    different weights. `teacher.prefetch_mib` is divided equally among the teachers.
    """
    addresses, teacher = services_of(config), config.teacher_link
    if teacher is None:
        yield {}
        return
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                TeacherClient(
                    address,
                    patience_seconds=teacher.patience_seconds,
                    max_prefetch_bytes=teacher.prefetch_mib * _MIB // len(addresses),
                    field=field_of(name),
                    adapter=teacher.adapter or "",
                )
            )
            for name, address in addresses.items()
        }
        yield {
            name: Connection(client, client.info(), label_of(name))
            for name, client in clients.items()
        }
