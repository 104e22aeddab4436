"""Prompts, their order, sequences, batches and captured stores."""
