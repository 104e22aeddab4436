"""Versions of the weights that are sent to the engines through a process group, or as files.

Versions of training steps are pushed (`rollout_client/push/`). Versions of evaluations are files,
because an evaluation may outlive an engine. A pushed version is also written as files if an engine
does not verify it, or if its last engine is lost before its orders have ended.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from accelerate import Accelerator

from protos.rpc.failpoints import failpoint
from student_trainer.parallel.collectives import max_over_ranks
from student_trainer.rollout_client.engine_replica import Pushed
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.push.pusher import WeightPusher
from student_trainer.rollout_client.push.stream import WeightsOffer, WeightSpec
from student_trainer.rollout_client.snapshots import Snapshots

log = logging.getLogger(__name__)


class PushedVersions:
    """The versions of one attempt. Every process has one; processes with a pusher send weights."""

    def __init__(
        self,
        accelerator: Accelerator,
        snapshots: Snapshots,
        pushed: Pushed,
        pusher: WeightPusher | None,
    ) -> None:
        """`pusher`: None in a process that takes part only in gathering the weights."""
        self._accelerator = accelerator
        self._snapshots = snapshots
        self._pushed = pushed
        self._pusher = pusher

    @property
    def newest(self) -> WeightsVersion:
        """The version that was written last as files."""
        return self._snapshots.newest

    def push(self, number: int) -> WeightsVersion:
        """Collective. Send the current weights as version `number`; return it.

        Raises Unavailable on all ranks if an engine does not get them and writing the files fails.
        """
        version = self._snapshots.version(number)
        if not self._snapshots.has(version):
            if self._push_to_engines(version):
                version = replace(version, pushed=True)
            else:
                version = self._snapshots.write(number)
        self._pushed.newest = version
        return version

    def restore_lost(self, version: WeightsVersion, number: int) -> WeightsVersion | None:
        """Collective. Write the current weights as files if an order of any process needs it.

        `version`: the one pushed last. `number`: the version of the current weights. Returns the
        written version, or None.
        """
        if not max_over_ranks(self._accelerator, int(self._pushed.lacks(version))):
            return None
        if self._accelerator.is_main_process:
            log.warning("no engine has version %d; %d is written as files", version.number, number)
        self._pushed.newest = written_version = self._snapshots.write(number)
        return written_version

    def write(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Collective. Write the current weights as files; see `Snapshots.write`."""
        return self._snapshots.write(number, anchor=anchor)

    def delete_before(self, number: int) -> None:
        """Delete the versions before `number` that are files."""
        self._snapshots.delete_before(number)

    def close(self) -> None:
        """Leave the group, and delete all files. Not collective."""
        if self._pusher is not None:
            self._pusher.close()
        self._snapshots.close()

    def _push_to_engines(self, version: WeightsVersion) -> bool:
        """Collective. Send the weights to the engines; return whether all have verified them."""
        probe, dtype = self._snapshots.probe()
        published = self._snapshots.published()
        pusher = self._pusher
        if pusher is not None:
            specs = [WeightSpec.describe(name, size) for name, size in published.sizes.items()]
            pusher.begin(WeightsOffer(replace(version, pushed=True), dtype, specs, probe))
        is_sending = pusher is not None and pusher.is_sending
        if max_over_ranks(self._accelerator, int(is_sending)):
            device = pusher.device if pusher is not None else torch.device("cpu")
            for group in published.iterate_layers(
                lambda: pusher is not None and pusher.is_sending, device
            ):
                if pusher is not None:
                    for name, weight in group.items():
                        pusher.send(name, weight)
                failpoint("layer-gathered")
        failed = pusher is not None and not pusher.finish()
        return not max_over_ranks(self._accelerator, int(failed))
