"""Tail draws: noise, training and speed."""
