"""One file per method: what a step of it consists of."""
