"""`distill demo` and `distill demo-rl`: they start real processes here and stop them again."""
