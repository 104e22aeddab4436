"""The users of a server: quotas of the owners of tokens, and the audit log."""
