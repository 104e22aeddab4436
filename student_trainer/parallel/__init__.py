"""Parallel training: sharding of the student, collectives, and the launcher of processes."""
