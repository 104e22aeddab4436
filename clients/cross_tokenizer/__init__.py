"""Alignment by bytes of two tokenizers' tokens for one text. Needs numpy, not torch."""
