"""Sharding, collectives and the launcher."""
