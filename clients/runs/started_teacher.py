"""The teacher that the owner of a run started for its job, as a file of the run directory names it.

The owner, a server or `distill run`, replaces the file before each attempt. The job keeps
`teacher.model`; the attempt's processes connect to the address in the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from clients.config.kinds import AnyTraining, started_teacher
from clients.data.regular_file import read_document
from clients.runs.directory import replace_file
from protos.errors import Unavailable

_NAME = "teacher.json"


def write_address(run: Path, address: str) -> None:
    """Write the HOST:PORT of the started teacher to the run directory."""
    replace_file(run / _NAME, json.dumps({"address": address}) + "\n")


def connected(config: AnyTraining, run: Path) -> AnyTraining:
    """Return the job with the address of its started teacher in place of `teacher.model`.

    A job without one is returned as it is. Raises Unavailable if no teacher was started.
    """
    teacher = started_teacher(config)
    if teacher is None:
        return config
    try:
        address = str(read_document(run / _NAME)["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            "the teacher of the job has not been started",
            field="teacher.model",
            hint="run the job with a server or with distill run",
        ) from error
    connected_teacher = teacher.model_copy(update={"model": None, "address": address})
    return config.model_copy(update={"teacher": connected_teacher})
