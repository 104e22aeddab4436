"""One file per command of `distill`."""
