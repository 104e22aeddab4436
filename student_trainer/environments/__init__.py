"""What a student may ask while it answers."""
