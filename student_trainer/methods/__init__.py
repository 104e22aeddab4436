"""The training methods, one file each. The docstring of each file lists the parts of a step in
order.
"""
