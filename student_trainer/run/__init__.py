"""The records of a run (metrics, trackers, provenance), and checks before the training."""
