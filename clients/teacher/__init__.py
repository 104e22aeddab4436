"""The client of a teacher service."""
