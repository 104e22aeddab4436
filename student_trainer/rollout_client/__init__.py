"""The client of rollout services: sends orders, publishes weights, and starts local services."""
