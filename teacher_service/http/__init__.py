"""The HTTP front of the teacher: the scoring endpoints of vLLM and SGLang, for other trainers."""
