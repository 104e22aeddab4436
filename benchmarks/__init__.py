"""Benchmarks of speed, memory, size and training quality."""
