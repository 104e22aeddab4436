"""Captured rows on disk: Arrow shards and a manifest, with readers, checks, merge and sample."""
