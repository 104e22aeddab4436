"""The student model: loading, adapters, probes, and the forward pass that computes the loss."""
