"""Runs `benchmarks/offline/benchmark.py`."""

from benchmarks.offline.benchmark import main

if __name__ == "__main__":
    main()
