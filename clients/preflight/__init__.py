"""Checks of a job before it is queued or started."""
