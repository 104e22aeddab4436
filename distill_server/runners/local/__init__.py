"""Attempts as processes of this machine, each under a shim."""
