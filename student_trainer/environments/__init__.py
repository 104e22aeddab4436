"""Environments: retrievers that the student queries while it answers."""
