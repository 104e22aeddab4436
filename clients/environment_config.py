"""What a student may ask while it answers: the table `environment` of a job file."""

from __future__ import annotations

from typing import Literal

from clients.config import _Table


class SearchConfig(_Table):
    """Passages for the student's queries."""

    type: Literal["search"] = "search"
    """The environment."""
