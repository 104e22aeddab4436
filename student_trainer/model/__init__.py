"""The student model: loading, the forward pass into the loss, adapters."""
