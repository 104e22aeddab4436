"""`distill demo` and `distill demo-rl`: real processes on this machine, started and stopped."""
