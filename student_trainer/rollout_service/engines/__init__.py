"""Rollout engines: the interface (`base`), one file for each of hf and vllm, and vllm's parts."""
