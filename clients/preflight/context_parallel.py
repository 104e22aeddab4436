"""Check that the processes of a context-parallel group can share the student's heads.

Imports no torch. `student_trainer/parallel/context_parallel.py` checks the rest of the student when
the job starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.config.kinds import AnyTraining
from clients.preflight.tensor_parallel import divided_counts, local_config, refuse_indivisible

FIELD = "train.context_parallel"
_HEADS = "heads of queries"


def check_context_parallel(config: AnyTraining) -> None:
    """Raise InvalidInput if a group does not divide the heads of a local student evenly.

    A student from the hub is checked when the job starts.
    """
    refuse_indivisible_heads(local_config(config.student), config.train.context_parallel)


def refuse_indivisible_heads(config: Mapping[str, Any], size: int) -> None:
    """Raise InvalidInput if `size` does not divide the heads of queries of a text model.

    Heads of keys and values are repeated where a group has more processes.
    """
    counts = divided_counts(config)
    heads = {_HEADS: counts[_HEADS]} if _HEADS in counts else {}
    refuse_indivisible(heads, size, FIELD)
