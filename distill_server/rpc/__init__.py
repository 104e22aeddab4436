"""The gRPC service of jobs: decoding, encoding, streams and artifacts."""
