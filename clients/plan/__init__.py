"""What `distill plan` and `distill pair` compute and print before anything is loaded."""
