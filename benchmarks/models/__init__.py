"""Models as teacher and student: supported types, scoring speed and memory."""
