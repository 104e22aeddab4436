"""Model directories: found, checked, fingerprinted and loaded."""
