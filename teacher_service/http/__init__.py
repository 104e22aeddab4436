"""The HTTP front of the teacher: the scoring endpoints of vLLM, for other trainers."""
