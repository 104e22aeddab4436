"""The program of `distill eval`: python -m student_trainer.exam < ExamConfig as JSON.

The program prints one JSON object to stdout: the rows of the table, or `error` with the fields of
the error. The exit code is that of the error. Progress is printed to stderr. torch is imported only
if a model runs in this process.
"""

from __future__ import annotations

import json
import logging
import sys

from clients.config.evaluation import ExamConfig
from clients.runs.progress import print_reply
from student_trainer.exam.evaluation import run
from student_trainer.exam.report import format_row, table_columns
from student_trainer.parallel.launcher import end_with_parent


def main() -> int:
    """Run the evaluation that stdin describes, and return the exit code."""
    end_with_parent()  # otherwise it would keep the lock of the directory after its parent ended
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    def work() -> str:
        rows = run(ExamConfig.model_validate_json(sys.stdin.read()))
        columns = table_columns(rows)
        table = [format_row(row, columns) for row in rows]
        return json.dumps({"models": rows, "columns": columns, "table": table})

    return print_reply(work)


if __name__ == "__main__":
    sys.exit(main())
