"""The sources of teacher rows: teacher services, and the anchor (EMA of the student)."""
