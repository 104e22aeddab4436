"""The client of a teacher service: scores sequences over gRPC and reconnects automatically."""
