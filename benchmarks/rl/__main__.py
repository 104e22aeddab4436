"""Runs `benchmarks/rl/benchmark.py`."""

from benchmarks.rl.benchmark import main

if __name__ == "__main__":
    main()
