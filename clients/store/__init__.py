"""Stored rows: Arrow shards, a manifest, and what reads, checks, merges and samples them."""
