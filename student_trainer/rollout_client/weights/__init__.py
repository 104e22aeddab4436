"""How versions of the student's weights reach the rollout engines."""
