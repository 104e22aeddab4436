"""One file per way of running the model."""
