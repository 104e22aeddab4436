"""Finds, checks, fingerprints and loads model directories."""
