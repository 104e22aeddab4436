"""The objectives to minimise: distillation and reinforcement learning, as losses of rows."""
