"""`distill demo` and `distill demo-rl`, which start and stop real processes."""
