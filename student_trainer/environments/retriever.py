"""The interface of retrievers, and the format of their passages. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clients.config.tables.environment import SearchConfig
from protos.errors import InvalidInput
from protos.extras import install_command
from student_trainer.environments.local_retriever import LocalRetriever


class Retriever(Protocol):
    """Finds passages for queries."""

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """Return at most `count` passages for each query, best first; None if the retriever failed.

        A passage is its title, a line end and its text. Does not raise if the retriever fails.
        """


def make_retriever(config: SearchConfig) -> Retriever:
    """Return the retriever that `config` names: a corpus on this machine or a server.

    Raises InvalidInput if the corpus cannot be read, the address is not allowed, or a package is
    not installed; Unavailable if the server does not answer like a retrieval server.
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


def format_passages(passages: Sequence[str]) -> str:
    """Return the passages as the text that the student reads, in the format of Search-R1."""
    lines = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()
