"""verl's on-policy distillation with the rows of a distill-teacher in place of verl's own servers.

    export PYTHONPATH=DISTILL_SERVICE VERL_USE_EXTERNAL_MODULES=deploy.adapters.verl
    python -m verl.trainer.main_ppo distillation.enabled=True \\
        distillation.teacher_models.teacher_model.model_path=HOST:50052 ...

`model_path` is the address of a teacher; several, divided by commas, are replicas. Both variables
must reach verl's Ray workers (`ray_init.runtime_env.env_vars`), as must `DISTILL_TEACHER_TOKEN` and
`DISTILL_TLS_CA` of a teacher that needs them. verl reserves the GPUs of `distillation.nnodes` and
`n_gpus_per_node` all the same: set both, and the `tensor_model_parallel_size` of
`teacher_model.inference`, to 1. Written for verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput


@dataclass(frozen=True)
class Scored:
    """The part of a server's answer that verl reads: `prompt_ids`, `prompt_logprobs` [T, k]."""

    extra_fields: dict[str, Any]


class DistillTeacher:
    """Replaces verl's LLMServerClient of a teacher. It can be pickled and connects on first use.

    Row t describes token t + 1; the last row is 0, as in verl. k = 0 requests the log-probs of the
    sequence's own tokens, in one column.
    """

    def __init__(self, address: str) -> None:
        self._addresses = address.split(",")
        self._client: TeacherClient | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return DistillTeacher, (",".join(self._addresses),)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **arguments: Any,
    ) -> Scored:
        """Return the rows of a sequence. Raises InvalidInput for images, and at temperatures but 1.

        Fails as TeacherClient does.
        """
        media = [
            name for name, argument in arguments.items() if name.endswith("_data") and argument
        ]
        if media or sampling_params["temperature"] != 1.0:
            field = media[0] if media else "temperature"
            raise InvalidInput(
                "rows are of text at temperature 1", field=field, hint="leave it out"
            )
        if self._client is None:
            self._client = TeacherClient(self._addresses)
        k, tokens = sampling_params["prompt_logprobs"], np.array(prompt_ids, np.int32)
        query = ScoreQuery(tokens, 1, top_k=max(k, 1), f32=True)
        block = await asyncio.wrap_future(self._client.submit(query))
        ids, logprobs = block.head_ids, block.head_logprobs
        if not k:
            ids, logprobs = tokens[1:, None], block.token_logprobs[:, None]
        padding = ((0, 1), (0, 0))
        return Scored(
            {"prompt_ids": np.pad(ids, padding), "prompt_logprobs": np.pad(logprobs, padding)}
        )


class DistillTeachers:
    """Replaces verl's MultiTeacherModelManager; it starts no server."""

    def __init__(self, config: Any, resource_pool: object) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        teachers = omega_conf_to_dataclass(config.distillation).teacher_models
        self._clients = {
            key: DistillTeacher(teacher.model_path) for key, teacher in teachers.items()
        }

    def get_client(self) -> dict[str, DistillTeacher]:
        """Return the client of each teacher, by its routing key."""
        return dict(self._clients)


if "verl" in sys.modules:  # verl imports this module before its trainers
    import verl.experimental.teacher_loop as teacher_loop

    teacher_loop.MultiTeacherModelManager = DistillTeachers
