"""Rollout engines: the interface (`base`), the engines `hf` and `vllm`, and the parts of `vllm`."""
