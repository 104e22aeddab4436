"""The row cache of the teacher service: tiers in memory, in Redis and on disk."""
