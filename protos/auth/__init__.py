"""Tokens, scoped tokens, roles and TLS."""
