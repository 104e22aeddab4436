"""The training loop, its checkpoints, evaluation and watches."""
