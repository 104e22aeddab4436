"""The fused head and loss: logits are computed and reduced in chunks. Needs torch only."""
