"""Computes the model's head and the loss together, in chunks of rows. Needs torch only."""
