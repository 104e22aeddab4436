"""The common parts of the start of each program: options, version, interrupts and logging."""
