"""The table `environment` of a job file: a search engine that the student queries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from clients.config.tables.common import Count, FittedTable, Name
from clients.data.formats import FILE_SUFFIXES, FORMATS

URL_SCHEMES = ("http://", "https://")
PASSAGES = "contents"  # the column of a file of passages


class SearchConfig(FittedTable):
    """A search engine for queries that the student writes between <search> and </search>.

    The student continues its answer after the passages that the engine returns (Search-R1).
    """

    fitted = frozenset({"max_passage_tokens"})
    retriever: Name
    """A file of passages (searched with BM25), or http://HOST:PORT/retrieve; see docs/search.md."""
    type: Literal["search"] = "search"
    """The environment."""
    max_turns: Count = 4
    """Maximum queries per answer that return passages. After the last, the student must answer."""
    passages: Count = 3
    """Passages per query."""
    max_passage_tokens: Count = 500
    """Maximum tokens of one query's passages. They also count towards `method.max_new_tokens`."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Seconds for one reply of a remote retriever; a query is sent at most four times."""

    @field_validator("retriever")
    @classmethod
    def _is_either(cls, retriever: str) -> str:
        if not retriever.startswith(URL_SCHEMES) and not retriever.endswith(FILE_SUFFIXES):
            raise ValueError(
                f"must be a file of passages ({FORMATS}), or http://HOST:PORT/retrieve"
            )
        return retriever

    @property
    def remote(self) -> bool:
        """True if the retriever is a server, False if it is a file of passages."""
        return self.retriever.startswith(URL_SCHEMES)
