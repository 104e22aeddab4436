"""Environments that the student uses while it answers: retrievers for search queries."""
