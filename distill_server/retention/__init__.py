"""Removal of ended jobs, and backups of the database."""
