"""One script a claim; `python -m benchmarks.evidence.page` writes docs/evidence.md from results."""
