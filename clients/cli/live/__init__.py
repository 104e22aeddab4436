"""Jobs while they run: the foreground run and the live display."""
