"""Runs `benchmarks/server/benchmark.py`."""

from benchmarks.server.benchmark import main

if __name__ == "__main__":
    main()
