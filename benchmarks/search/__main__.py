"""Runs `benchmarks/search/benchmark.py`."""

from benchmarks.search.benchmark import main

if __name__ == "__main__":
    main()
