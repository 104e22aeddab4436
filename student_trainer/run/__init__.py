"""The records of a run (metrics, trackers, provenance) and its checks before training."""
