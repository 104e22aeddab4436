"""An archive with which a machine without a network tests and measures its GPU."""
