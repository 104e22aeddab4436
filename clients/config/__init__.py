"""The job file: its tables, one file per method, and the reader that reports every problem."""
