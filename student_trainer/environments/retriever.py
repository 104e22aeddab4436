"""Where passages come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clients.config.environment import SearchConfig
from protos.errors import InvalidInput
from protos.extras import install_command
from student_trainer.environments.local_retriever import LocalRetriever


class Retriever(Protocol):
    """Answers queries."""

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """At most `count` passages for each query, best first, each its title's line and its text;
        None where the retriever failed.
        """


def make_retriever(config: SearchConfig) -> Retriever:
    """Raises InvalidInput for a corpus that cannot be read, or where a package is not installed,
    Unavailable for a server that does not answer as one.
    """
    if not config.remote:
        return LocalRetriever(config.retriever)
    try:
        from student_trainer.environments.remote_retriever import RemoteRetriever
    except ImportError:
        raise InvalidInput(
            "a retrieval server needs the package httpx, which is not installed",
            field="environment.retriever",
            hint=install_command("rl"),
        ) from None
    return RemoteRetriever(config.retriever, timeout_seconds=config.timeout_seconds)


def as_text(passages: Sequence[str]) -> str:
    """What the student reads, as Search-R1 writes it."""
    lines = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()
