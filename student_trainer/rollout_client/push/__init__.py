"""Pushes of weights from the trainer to rollout engines, through a process group."""
