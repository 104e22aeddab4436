"""Data sets, tokenization, model directories and the model hub."""
