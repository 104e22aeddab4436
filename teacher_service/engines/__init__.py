"""Scoring engines: the interface (`base`), and the files of hf, vllm, endpoint and fake."""
