"""The scoring head: hidden states in, rows out."""
