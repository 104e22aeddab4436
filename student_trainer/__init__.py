"""The student's side: losses, rollouts, the sources of teacher rows, and the training loop."""
