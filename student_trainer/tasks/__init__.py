"""Small verifiable tasks that need no download."""
