"""The job server under load."""
