"""Checks that tensor- and context-parallel groups can divide the student. Does not import torch.

This module checks only the numbers in config.json. `student_trainer/parallel` checks the modules of
the student when the job starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.config.tables.common import StudentConfig
from clients.config.tables.job import TrainingJob
from clients.data.outside import read_document
from protos.errors import InvalidInput

TENSOR_FIELD = "train.tensor_parallel"
# Keys of config.json with the counts that a group divides, and their names in messages.
_COUNT_KEYS = {
    "num_attention_heads": "heads of queries",
    "num_key_value_heads": "heads of keys and values",
    "intermediate_size": "units of the MLP",
}


def check_tensor_parallel(config: TrainingJob) -> None:
    """Raise InvalidInput if a local student does not divide evenly over a tensor-parallel group.

    A student from the hub is checked when the job starts.
    """
    if config.train.tensor_parallel > 1:
        counts = divided_counts(local_config(config.student))
        refuse_indivisible(counts, config.train.tensor_parallel, TENSOR_FIELD)


def local_config(student: StudentConfig) -> dict[str, Any]:
    """Return the configuration of a local student's text model; {} if it cannot be read.

    The job's program reports the error in the file.
    """
    try:
        model_config = read_document(Path(student.model) / "config.json")
    except (OSError, ValueError):
        return {}
    return (
        (model_config.get("text_config") or model_config) if isinstance(model_config, dict) else {}
    )


def divided_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts that a tensor-parallel group divides, by name. `config`: a config.json."""
    values = {name: config.get(key) for key, name in _COUNT_KEYS.items()}
    return {name: count for name, count in values.items() if isinstance(count, int) and count > 0}


def refuse_indivisible(counts: Mapping[str, int], size: int, field: str) -> None:
    """Raise InvalidInput if one of `counts` is not divisible by `size`, the value of `field`."""
    for name, count in counts.items():
        if count % size:
            # A divisor of `size` also divides train.processes.
            divisors = [divisor for divisor in range(1, size) if size % divisor == 0]
            possible = [
                divisor
                for divisor in divisors
                if all(shared_count % divisor == 0 for shared_count in counts.values())
            ]
            raise InvalidInput(
                f"{size} processes cannot share the {count} {name} of the student evenly",
                field=field,
                hint=f"lower the value to {possible[-1]}" if possible[-1] > 1 else "remove the key",
            )


CONTEXT_FIELD = "train.context_parallel"
_HEADS = "heads of queries"


def check_context_parallel(config: TrainingJob) -> None:
    """Raise InvalidInput if the heads of a local student do not divide evenly over a group.

    A student from the hub is checked when the job starts.
    """
    refuse_indivisible_heads(local_config(config.student), config.train.context_parallel)


def refuse_indivisible_heads(config: Mapping[str, Any], size: int) -> None:
    """Raise InvalidInput if the number of query heads of a text model is not divisible by `size`.

    Key and value heads are repeated if a group has more processes than heads.
    """
    counts = divided_counts(config)
    heads = {_HEADS: counts[_HEADS]} if _HEADS in counts else {}
    refuse_indivisible(heads, size, CONTEXT_FIELD)
