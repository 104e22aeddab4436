"""The commands `distill demo` and `distill demo-rl`. They start and stop real processes."""
