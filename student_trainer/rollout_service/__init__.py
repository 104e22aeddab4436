"""`distill-rollouts`: samples rollouts with the student's weights, in a separate process."""
