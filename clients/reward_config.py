"""What an answer is worth: the table `reward` of a job file."""

from __future__ import annotations

from clients.config import Name, _Table


class RewardConfig(_Table):
    """Scores what the student wrote."""

    type: Name = "exact_match"
    """math, exact_match, regex or reasoning_gym:TASK."""
