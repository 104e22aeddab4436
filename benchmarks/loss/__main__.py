"""Runs `benchmarks/loss/benchmark.py`."""

from benchmarks.loss.benchmark import main

if __name__ == "__main__":
    main()
