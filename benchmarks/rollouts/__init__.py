"""Rollouts: engines, weight pushes, overlap and lag."""
