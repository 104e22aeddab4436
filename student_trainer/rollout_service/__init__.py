"""The program `distill-rollouts`: samples rollouts with the student, in a separate process."""
