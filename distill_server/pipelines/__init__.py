"""Jobs that start after others and read their outputs."""
