"""The command `distill`. Nothing heavy is imported at the top here: `--help` must be instant."""
