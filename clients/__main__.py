"""Runs the `distill` command: `python -m clients ...` equals `distill ...`."""

import sys

from clients.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
