"""Runners of attempts: the interface and what all runners share."""
