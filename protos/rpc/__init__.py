"""gRPC on both ends: channels, servers, statuses, health checks, limits; failpoints for tests."""
