"""gRPC for servers and clients: channels, statuses, health checks, limits and failpoints."""
