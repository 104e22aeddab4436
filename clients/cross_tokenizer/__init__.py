"""Aligns the tokens of two tokenizers for the same text by their bytes. Needs numpy, not torch."""
