"""The PPO critic and its advantages."""
