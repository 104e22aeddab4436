"""The fused loss: memory, time, peers, and the noise of its estimators."""
