"""What a run records: metrics, trackers, provenance; and its checks at start."""
