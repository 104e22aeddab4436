"""Offline distillation and captures."""
