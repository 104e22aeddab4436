"""Stores of rows on disk or in object storage: writing, reading, checking, merging and sampling."""
