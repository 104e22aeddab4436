"""The program of capture jobs: scores a data set once and writes the rows to a store."""
