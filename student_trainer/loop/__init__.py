"""The training loop, its checkpoints, its held-out evaluation, and its warnings."""
