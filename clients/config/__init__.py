"""The job file: tables, one module per method, and a reader that reports all problems at once."""
