"""The computations and outputs of `distill plan` and `distill pair`, which load no weights."""
