"""Limits the number of stored events of jobs."""
