"""Rows on the wire and in stores: bytes and CPU time."""
