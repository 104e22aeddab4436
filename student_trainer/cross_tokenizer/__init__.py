"""Distillation between different tokenizers: teacher, stored rows, batches, losses, objectives."""
