"""The job server: accepts jobs over gRPC, schedules and follows them, and serves a dashboard."""
