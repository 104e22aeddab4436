"""Distillation between a student and a teacher with different tokenizers.

The package has the teacher, the reader of stored rows, the batches, the losses and the objectives.
"""
