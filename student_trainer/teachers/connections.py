"""Connections to the teacher services of a job. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from clients.config.tables.job import TrainingJob
from clients.preflight.teachers import field_of, label_of, services_of
from clients.teacher.client import TeacherClient, TeacherInfo
from clients.teacher.query import identity_of

_MIB = 1 << 20


@dataclass(frozen=True)
class Connection:
    """A connected teacher service.

    - client: sends requests to the service.
    - info: the information that the service gave about its model.
    - label: the name of the teacher in messages, such as `teacher math`.
    """

    client: TeacherClient
    info: TeacherInfo
    label: str

    def narrowed_vocab_size(self, vocab_size: int) -> int | None:
        """Return the number of logits to request: `vocab_size` if the teacher has more logits.

        Otherwise return None, which requests all logits of the teacher.
        """
        return vocab_size if vocab_size < self.info.vocab_size else None

    @property
    def identity(self) -> str:
        """The text that identifies the teacher's weights: their fingerprint and version."""
        return identity_of(self.info.fingerprint, self.info.version)


def teacher_facts(teachers: Mapping[str, Connection]) -> Mapping[str, str]:
    """Return the identity of each teacher, by label. Every checkpoint stores them; see `Saver`."""
    return {teacher.label: teacher.identity for teacher in teachers.values()}


def describe_changed_teachers(
    teachers: Mapping[str, Connection], checkpoint_facts: Mapping[str, str], step: int
) -> Sequence[str]:
    """Return a sentence for each teacher that has changed since the checkpoint of `step`.

    `checkpoint_facts`: the facts of the checkpoint, with the earlier identities. A teacher changes,
    for example, if its service is restarted with another model at the same address.
    """
    return [
        f"the {teacher.label} {teacher.info.model} has another fingerprint than the teacher of the"
        f" steps up to {step}: other weights, another dtype, engine or device"
        for teacher in teachers.values()
        if checkpoint_facts.get(teacher.label, teacher.identity) != teacher.identity
    ]


@contextmanager
def connect(config: TrainingJob) -> Iterator[Mapping[str, Connection]]:
    """Context with a connection to every teacher of the job.

    Yields the connections by teacher name. The name of a single teacher is "". The mapping is empty
    if the job needs no teacher. The value of `teacher.prefetch_mib` is divided equally among the
    teachers. Raises Unavailable if a teacher does not answer, and WrongState if the addresses of
    one teacher serve different weights.
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
