"""The job file: its tables, one module per method, and a reader that reports all problems of a file
at once.
"""

import clients.config.problems  # noqa: F401  # gives the constructors of tables their messages
