"""Sharding of the student, collectives, and the launcher of processes."""
