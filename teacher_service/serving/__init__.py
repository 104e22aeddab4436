"""The gRPC service: streams, validation, batching, scoring and weight updates."""
