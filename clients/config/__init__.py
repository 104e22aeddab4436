"""The job file: its tables, one module per method, and the reader that reports every problem."""
