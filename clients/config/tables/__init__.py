"""The tables of a job file that several methods share."""
