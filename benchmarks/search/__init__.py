"""A model that learns to use a search tool."""
