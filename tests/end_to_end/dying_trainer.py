"""The real trainer, until it kills itself at the n-th file operation of a kind on a path.

    python dying_trainer.py EVENT TEXT N RUN_DIR --attempt K

EVENT: an audit event of Python ("open", "os.rename"); TEXT: part of one of its arguments.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> int:
    _, event, text, count, *arguments = sys.argv
    left = int(count)

    def on_event(name: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        if name == event and any(text in str(value) for value in values):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    sys.argv[1:] = arguments
    from student_trainer.__main__ import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
