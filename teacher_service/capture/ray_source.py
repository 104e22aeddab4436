"""Rows from engines on a Ray cluster, one engine per actor.

Ray Data distributes the files of the plan to the actors, reassigns the files of a lost actor, and
returns the rows in the order of the data. At the start, the token ids of all missing files are put
into Ray's object store: 4 bytes per token.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from clients.config.capture import CaptureJob, RayConfig
from protos.errors import DistillError, InvalidInput, Unavailable, error_of
from protos.extras import install_command
from teacher_service.capture.plan import CapturePlan
from teacher_service.capture.sequences import CaptureSequence
from teacher_service.capture.sources import OnScored, QuerySettings, score_file
from teacher_service.capture.teacher import load_engine
from teacher_service.engines.base import ScoringEngineInfo


class RaySource:
    """A row source that scores on a Ray cluster.

    Connects to the cluster at $RAY_ADDRESS, or starts one on this machine. Raises InvalidInput if
    Ray is not installed or the cluster is too small, Unavailable if no cluster responds.
    """

    def __init__(self, job: CaptureJob) -> None:
        self._job = job
        self._ray = _connect_ray()
        self._plan: CapturePlan | None = None
        self._query_settings: QuerySettings | None = None
        self._resources, self._actors = _compute_shares(
            job.method.ray or RayConfig(), job.teacher.gpus_of_model, self._ray
        )

    def info(self) -> ScoringEngineInfo:
        """Load an engine on the cluster and return its info. Raises the error if loading fails."""
        remote = self._ray.remote(**self._resources)(_info_or_fault)
        engine_info, fault = self._ray.get(remote.remote(self._job))
        if fault is not None:
            raise _decode_error(fault)
        assert isinstance(engine_info, ScoringEngineInfo)
        return engine_info

    def for_plan(self, plan: CapturePlan, query_settings: QuerySettings) -> RaySource:
        """Set the plan whose files are scored and the settings of queries; return this source."""
        self._plan, self._query_settings = plan, query_settings
        return self

    def files(self, numbers: range, on_scored: OnScored) -> Iterator[Sequence[bytes]]:
        """Yield the encoded rows of each file in `numbers`; call `for_plan` first.

        `on_scored` is called for the sequences of a file when the whole file is scored.
        """
        assert self._plan is not None
        if not numbers:
            return
        data = self._ray.data
        context = data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        scored = data.from_items(
            [_pack_file(self._plan, number) for number in numbers], override_num_blocks=len(numbers)
        ).map_batches(
            FileScorer,
            fn_constructor_args=(self._job, self._query_settings),
            batch_size=1,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(size=self._actors),
            **self._resources,
        )
        for number, row in zip(numbers, scored.iter_rows(), strict=True):
            if row["fault"]:
                raise _decode_error(row["fault"])
            for index in self._plan.file(number):
                on_scored(self._plan[index].rows)
            yield row["rows"]


class FileScorer:
    """An actor of Ray Data: an engine that scores whole files of the plan.

    The actor maps a batch of packed files to a table with the columns `rows` (encoded rows of each
    sequence) and `fault` (an error as JSON, or "").
    """

    def __init__(self, job: CaptureJob, query_settings: QuerySettings) -> None:
        self._engine = load_engine(job.teacher)
        self._query_settings = query_settings
        self._max_batch_tokens = job.teacher.max_batch_tokens

    def __call__(self, batch: Any) -> Any:
        """Score one Ray Data batch (a pyarrow table) and return its rows and faults."""
        import pyarrow as pa

        rows: list[list[bytes]] = []
        faults: list[str] = []
        for packed in batch.to_pylist():
            try:
                blocks = score_file(
                    self._engine,
                    self._query_settings,
                    _unpack_file(packed),
                    packed["first"],
                    self._max_batch_tokens,
                )
                rows.append([self._query_settings.encode(block) for block in blocks])
                faults.append("")
            except DistillError as error:
                rows.append([])
                faults.append(_encode_error(error))
        return pa.table({"rows": pa.array(rows, pa.list_(pa.large_binary())), "fault": faults})


def _connect_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise InvalidInput(
            "Ray is not installed", field="method.ray", hint=install_command("ray")
        ) from error
    # Without an address, Ray starts a cluster on this machine. Other machines must not reach it.
    local = {} if os.environ.get("RAY_ADDRESS") else {"_node_ip_address": "127.0.0.1"}
    try:
        ray.init(ignore_reinit_error=True, include_dashboard=None, log_to_driver=False, **local)
    except ConnectionError as error:
        raise Unavailable(
            f"no Ray cluster responds at {os.environ.get('RAY_ADDRESS')}",
            field="method.ray",
            hint="start a cluster with ray start --head, or unset RAY_ADDRESS to use this machine",
        ) from error
    return ray


def _compute_shares(config: RayConfig, gpus_per_actor: int, ray: Any) -> tuple[dict[str, int], int]:
    """Return the resources of each actor, and the number of actors.

    `gpus_per_actor` is the number of GPUs of an actor, if the cluster has GPUs.
    """
    resources = ray.cluster_resources()
    cpus, gpus = math.floor(resources.get("CPU", 0)), math.floor(resources.get("GPU", 0))
    gpus_per_actor = gpus_per_actor if gpus else 0
    actors = config.actors or (gpus // gpus_per_actor if gpus_per_actor else 1) or 1
    # Ray's own tasks need one CPU; without it, no task would ever start.
    if actors * config.cpus_per_actor + 1 > cpus or actors * gpus_per_actor > gpus:
        raise InvalidInput(
            f"{actors} engines with {config.cpus_per_actor} CPUs each do not fit into a cluster of"
            f" {cpus} CPUs and {gpus} GPUs; one CPU must stay free for Ray",
            field="method.ray.actors",
            hint="use fewer actors, fewer CPUs per actor or fewer teacher.gpus, or add machines",
        )
    return {"num_cpus": config.cpus_per_actor, "num_gpus": gpus_per_actor}, actors


def _info_or_fault(job: CaptureJob) -> tuple[ScoringEngineInfo | None, str | None]:
    try:
        return load_engine(job.teacher).info, None
    except DistillError as error:
        return None, _encode_error(error)


def _pack_file(plan: CapturePlan, number: int) -> dict[str, Any]:
    indices = plan.file(number)
    tokens = slice(plan.offsets[indices.start], plan.offsets[indices.stop])
    lengths = np.diff(plan.offsets[indices.start : indices.stop + 1])
    return {
        "first": indices.start,
        "token_ids": plan.token_ids[tokens].tobytes(),
        "lengths": lengths.tolist(),
        "starts": plan.starts[indices.start : indices.stop].tolist(),
        "prompts": [plan[index].teacher_prompt.tobytes() for index in indices],
    }


def _unpack_file(packed: dict[str, Any]) -> list[CaptureSequence]:
    token_ids = np.frombuffer(packed["token_ids"], "<i4")
    ends = accumulate(packed["lengths"])
    columns = zip(ends, packed["lengths"], packed["starts"], packed["prompts"], strict=True)
    return [
        CaptureSequence(
            token_ids[end - length : end], start, teacher_prompt=np.frombuffer(prompt, "<i4")
        )
        for end, length, start, prompt in columns
    ]


def _encode_error(error: DistillError) -> str:
    return json.dumps([error.code, error.message, error.field, error.hint])


def _decode_error(text: str) -> DistillError:
    code, message, field, hint = json.loads(text)
    return error_of(code, message, field=field, hint=hint)
