"""The cost of reading data, against the number of records."""
