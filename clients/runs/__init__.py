"""The run directory that a trainer shares with whoever started it."""
