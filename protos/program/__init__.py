"""What every program does at its start: options, version, interrupts, logging."""
