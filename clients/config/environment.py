"""What a student may ask while it answers: the table `environment` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from clients.config.common import Count, Name, Table
from clients.data.records import FILE_SUFFIXES

URL_SCHEMES = ("http://", "https://")


class SearchConfig(Table):
    """Passages for what the student writes between <search> and </search> (Search-R1)."""

    retriever: Name
    """A .jsonl or .parquet file of passages, searched by BM25, or http://HOST:PORT/retrieve."""
    type: Literal["search"] = "search"
    """The environment."""
    max_turns: Count = 4
    """Queries of one answer that get passages; after the last the student must answer."""
    passages: Count = 3
    """For one query."""
    max_passage_tokens: Count = 500
    """Of one query's passages together; `method.max_new_tokens` counts them too."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """For one whole answer of a retriever, which is asked four times at most."""

    @field_validator("retriever")
    @classmethod
    def _is_either(cls, retriever: str) -> str:
        if not retriever.startswith(URL_SCHEMES) and not retriever.endswith(FILE_SUFFIXES):
            kinds = f"{' or '.join(FILE_SUFFIXES)} file"
            raise ValueError(f"must be a {kinds} of passages, or http://HOST:PORT/retrieve")
        return retriever

    @property
    def remote(self) -> bool:
        """Whether the retriever is a server."""
        return self.retriever.startswith(URL_SCHEMES)
