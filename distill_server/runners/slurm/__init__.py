"""A runner that runs each attempt as one job of Slurm."""
