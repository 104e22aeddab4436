"""Checks of a job before it is queued or started. Imports no torch."""
