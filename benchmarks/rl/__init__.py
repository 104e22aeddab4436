"""Reinforcement learning: anchors and estimators of the KL."""
