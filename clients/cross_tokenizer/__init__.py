"""The tokens of two tokenizers for one text, aligned by bytes. Needs numpy; no torch."""
