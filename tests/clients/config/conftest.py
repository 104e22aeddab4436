"""Job files in a directory of the test's own."""

from tests.clients.cli.conftest import _plain_environment, job_file  # noqa: F401
