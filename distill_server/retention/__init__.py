"""Removal of ended jobs, and import of run directories."""
