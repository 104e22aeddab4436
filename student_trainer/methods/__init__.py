"""The training methods, one file per method.

The docstring of each file lists the parts of a training step in order.
"""
