"""Checkpoints and the exported model: their contents, writing and reading."""
