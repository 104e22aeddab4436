"""The command `distill-teacher`, also `python -m teacher_service`."""

from __future__ import annotations

import sys

from protos.program.startup import EXIT_CODE, exit_on_interrupt, exit_unless_linux


def main() -> None:
    """Run the command line; the entry point of `distill-teacher`."""
    exit_unless_linux("distill-teacher")
    try:
        with exit_on_interrupt():
            from teacher_service.command import app
        app()
    except KeyboardInterrupt:  # Ctrl-C before the command has its own handler
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
