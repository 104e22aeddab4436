"""Checkpoints and the exported model: what they hold, and how they are written and read."""
