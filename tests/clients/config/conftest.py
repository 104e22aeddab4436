"""Fixtures: job files in a directory of each test."""

from tests.clients.cli.conftest import _plain_environment, job_file  # noqa: F401
