"""The teacher service: scores token sequences with a model and streams rows over gRPC."""
