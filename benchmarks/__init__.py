"""What the project claims about speed and size, measured."""
