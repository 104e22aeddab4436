"""The client of teacher services. It scores sequences over gRPC, and reconnects automatically."""
