"""Measurements on one CUDA device."""
