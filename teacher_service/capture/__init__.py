"""Scores a whole data set once and stores the rows: the program of a job of kind `capture`."""
