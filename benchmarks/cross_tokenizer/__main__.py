"""Runs `benchmarks/cross_tokenizer/benchmark.py`."""

from benchmarks.cross_tokenizer.benchmark import main

if __name__ == "__main__":
    main()
