"""The web dashboard of the job server, with Prometheus metrics at /metrics."""
