"""The start of a program: options, version, interrupts, logging."""
