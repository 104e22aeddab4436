"""Checks of a job before it is queued or started. Does not import torch."""
