"""Teachers that the server runs for jobs that name `teacher.model`."""
