"""The client of rollout services: orders, snapshots of weights, and services that a job starts."""
