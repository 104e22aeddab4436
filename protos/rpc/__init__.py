"""gRPC on both ends: channels, servers, statuses, health, limits; and the failpoints of tests."""
