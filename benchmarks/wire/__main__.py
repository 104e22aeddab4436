"""Runs `benchmarks/wire/benchmark.py`."""

from benchmarks.wire.benchmark import main

if __name__ == "__main__":
    main()
