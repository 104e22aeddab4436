"""Access to services: tokens with roles, scoped tokens of jobs, and TLS."""
