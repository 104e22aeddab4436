"""The interface of retrievers, the BM25 search of a local corpus, and the text format of passages.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clients.config.tables.environment import SearchConfig
from clients.data.formats import exists_here
from clients.data.records import DataSet, text_of
from protos.errors import InvalidInput
from protos.extras import install_command

COLUMN = "contents"
_FIELD = "environment.retriever"


class LocalRetriever:
    """A retriever that searches the passages of a file with BM25. All passages are in memory.

    A passage is a value of the column `contents`. It consists of a title, a line end and a text, as
    in the corpus of Search-R1.
    """

    def __init__(self, path: str) -> None:
        """Read and index the file.

        Raises InvalidInput if the file does not exist or has no passages, or if bm25s is not
        installed.
        """
        try:
            import bm25s
        except ImportError:
            raise InvalidInput(
                "a local corpus needs the package bm25s, which is not installed",
                field=_FIELD,
                hint=install_command("rl"),
            ) from None
        self._corpus = _read_corpus(path)
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(self._tokenize_texts(self._corpus), show_progress=False)

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """Return at most `count` passages for each query, the best first.

        Each passage shares a word with its query, so the list of a query may be empty.
        """
        passage_count = min(count, len(self._corpus))
        passage_indices, scores = self._index.retrieve(
            self._tokenize_texts(queries),
            k=passage_count,
            show_progress=False,
            backend_selection="numpy",
        )
        return [
            [
                self._corpus[passage_index]
                for passage_index, score in zip(*pair, strict=True)
                if score > 0
            ]
            for pair in zip(passage_indices.tolist(), scores.tolist(), strict=True)
        ]

    def _tokenize_texts(self, texts: Sequence[str]) -> list[list[str]]:
        words: list[list[str]] = self._tokenize(
            list(texts), stopwords=None, return_ids=False, show_progress=False
        )
        return words


def _read_corpus(path: str) -> list[str]:
    if not exists_here(path):
        raise InvalidInput(
            f"no such file: {path}", field=_FIELD, hint="give the path of a corpus file"
        )
    rows = DataSet(path, field=_FIELD).rows([COLUMN])
    corpus = [text_of(record, COLUMN, _FIELD, where) for where, record in rows]
    if not any(passage.strip() for passage in corpus):
        raise InvalidInput(
            f"{path} has no passages",
            field=_FIELD,
            hint=f"give records with text in the column {COLUMN}",
        )
    return corpus


class Retriever(Protocol):
    """Finds passages for queries."""

    def passages(self, queries: Sequence[str], count: int) -> list[list[str] | None]:
        """Return at most `count` passages for each query, the best first.

        A query for which the retriever failed gets None; the method does not raise in this case. A
        passage consists of a title, a line end and a text.
        """


def make_retriever(config: SearchConfig) -> Retriever:
    """Return the retriever that `config` selects: the search of a local corpus, or a server's
    client.

    Raises InvalidInput if the corpus cannot be read, if the address is not allowed, or if a package
    is not installed. Raises Unavailable if no retrieval server answers.
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
    """Return the text with passages that the student reads, in the format of Search-R1."""
    lines = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()
