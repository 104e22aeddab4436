"""The command `distill`, also `python -m clients`."""

from __future__ import annotations

import sys

from protos.program.startup import EXIT_CODE, exit_on_interrupt


def main() -> int:
    """Run the command line and return its exit code; the entry point of `distill`."""
    try:
        with exit_on_interrupt():
            from clients.cli.app import main as command
        return command()
    except KeyboardInterrupt:  # before the command handles it itself
        return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
