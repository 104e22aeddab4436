"""Scoring engines: the interface (`base`), and one file for each of hf, vllm and fake."""
