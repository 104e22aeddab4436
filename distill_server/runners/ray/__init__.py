"""Attempts as jobs of a Ray cluster."""
