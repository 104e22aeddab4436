"""Training of the student: methods, rollouts, teacher sources, losses, and the training loop."""
