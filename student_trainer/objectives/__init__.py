"""What is minimised: distillation and reinforcement learning as losses of rows."""
