"""The Ray cluster of a server."""

from __future__ import annotations

import logging
from typing import Protocol

from distill_server.runners.cluster import Cluster, Jobs
from distill_server.runners.ray.jobs import RayJobState

log = logging.getLogger(__name__)

# Between two polls of all followed jobs.
_PAUSE_SECONDS = 0.5


class RayClusterJobs(Jobs[RayJobState], Protocol):
    """The calls that RayCluster makes to a cluster. `RayJobs` implements them; calls may block."""

    def is_open(self) -> bool:
        """Return True if other machines can run programs on the cluster without a token."""


class RayCluster(Cluster[RayJobState]):
    """The last known state of the followed jobs of a Ray cluster."""

    def __init__(self, jobs: RayClusterJobs) -> None:
        self._calls = jobs
        super().__init__(jobs, "the Ray cluster", _PAUSE_SECONDS)

    def on_first_answer(self) -> None:
        """Warn if the cluster is open to other machines."""
        if self._calls.is_open():
            log.warning(
                "the Ray cluster requires no token: everyone who can reach it can run programs on"
                " it; start it with RAY_AUTH_MODE=token, or keep it behind a firewall"
            )
