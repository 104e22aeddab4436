"""The command `distill-rollouts`, also `python -m student_trainer.rollout_service`."""

from __future__ import annotations

import sys

from protos.program.startup import EXIT_CODE, exit_on_interrupt, exit_unless_linux


def main() -> None:
    """Run the command line; the entry point of `distill-rollouts`."""
    exit_unless_linux("distill-rollouts")
    try:
        with exit_on_interrupt():
            from student_trainer.rollout_service.command import app
        app()
    except KeyboardInterrupt:  # Ctrl-C before the command has its own handler
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
