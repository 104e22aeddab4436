"""What writes the student's answers."""
