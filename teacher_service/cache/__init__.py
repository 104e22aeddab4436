"""Rows that were scored before, in memory, in Redis and on disk."""
