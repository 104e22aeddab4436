"""The foreground run of a job, and the live display of its progress."""
