"""python -m student_trainer.exam < ExamConfig as JSON: the program of `distill eval`.

Prints one JSON object to stdout: the rows of the table, or `error` with the fields of the error.
Exits with the exit code of the error. Progress goes to stderr. Imports torch only if a model runs
in this process.
"""

from __future__ import annotations

import json
import logging
import sys

from clients.config.exam import ExamConfig
from protos.errors import DistillError, ExitCode
from student_trainer.exam.evaluation import run
from student_trainer.exam.report import format_row, table_columns
from student_trainer.parallel.launcher import end_with_parent


def main() -> int:
    """Run the evaluation that stdin describes, and return the exit code."""
    end_with_parent()  # otherwise it would keep the lock of the directory after its parent ended
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        rows = run(ExamConfig.model_validate_json(sys.stdin.read()))
    except DistillError as error:
        error_fields = {
            "code": error.code.value,
            "message": error.message,
            "field": error.field,
            "hint": error.hint,
        }
        print(json.dumps({"error": error_fields}))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    columns = table_columns(rows)
    table = [format_row(row, columns) for row in rows]
    print(json.dumps({"models": rows, "columns": columns, "table": table}))
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
