"""The training loop, the evaluation on held-out data, and the warnings of a run."""
