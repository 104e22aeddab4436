"""Runs `benchmarks/gpu/benchmark.py`."""

from benchmarks.gpu.benchmark import main

if __name__ == "__main__":
    main()
