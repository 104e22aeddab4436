"""Samples rollouts: single-turn with transformers, multi-turn with a search engine."""
