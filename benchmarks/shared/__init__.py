"""What several benchmarks use: meters, pictures, pages, models and results."""
