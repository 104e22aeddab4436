"""The sources of teacher rows: teacher services and the EMA anchor."""
