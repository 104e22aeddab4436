"""A teacher with another tokenizer."""
