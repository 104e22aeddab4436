"""The HTTP front of the teacher: the requests with which other trainers ask vLLM and SGLang."""
