"""The table `rollouts` of a job file: the program that samples the answers, and its lag."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from clients.config.tables.common import Address, Count, Rule, Table


class RolloutsConfig(Table):
    """The engine that samples the student's answers, and its maximum lag behind training."""

    engine: Literal["hf", "vllm"] = "hf"
    """hf: transformers. vllm: vLLM, in a separate process with its own copy of the weights."""
    lag: Annotated[int, Field(ge=0, le=16)] = 0
    """Maximum age, in steps, of the weights that sample. 0: newest weights. Above 0: own process.
    """
    in_flight: Literal["drain", "recompute", "keep"] = "drain"
    """Unfinished answers at new weights: finish first, or continue with a new or the old KV cache.
    """
    address: Address | None = None
    """HOST:PORT of a running `distill-rollouts`, or a list. Default: the trainer starts an engine.
    """
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of the engines, in addition to the trainer's. 0: engines share the trainer's GPUs."""
    tensor_parallel_size: Count = 1
    """GPUs that share each layer of the engine (vllm); `gpus` is a multiple of this number."""
    push: Literal["file"] = "file"
    """Transfer of new weights to the engine: as files."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU memory for vllm. Default: 0.9 of separate GPUs, 0.4 of the trainer's."""
    patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a response of an engine. Then the attempt ends; a server queues the job."""

    @field_validator("in_flight")
    @classmethod
    def _fits_engine(cls, in_flight: str, info: ValidationInfo) -> str:
        if in_flight != "drain" and info.data.get("engine") == "hf":
            raise ValueError(
                "needs rollouts.engine = 'vllm'; set rollouts.engine, or remove in_flight"
            )
        return in_flight

    @field_validator("tensor_parallel_size")
    @classmethod
    def _divides_gpus(cls, size: int, info: ValidationInfo) -> int:
        gpus = info.data.get("gpus", 0)
        if size > 1 and (not gpus or gpus % size):
            raise ValueError(
                f"rollouts.gpus = {gpus} is not a multiple of this value; raise rollouts.gpus"
            )
        return size

    @field_validator("push", mode="before")
    @classmethod
    def _is_file(cls, push: Any) -> Any:
        if push in ("broadcast", "ipc"):
            raise ValueError("only 'file' is supported; remove rollouts.push")
        return push

    @property
    def in_trainer(self) -> bool:
        """Whether the trainer's own process samples, with the trainer's weights."""
        return self.engine == "hf" and self.lag == 0 and self.address is None

    @property
    def memory_share(self) -> float:
        """Share of each GPU's memory for the engine. On a CPU, share of the machine's memory."""
        return self.gpu_memory_share or (0.9 if self.gpus else 0.4)

    @property
    def versions(self) -> int:
        """Maximum number of versions of the student's weights that exist at the same time.

        These are the versions of the last `lag` steps, the newest version, and the version being
        written. Versions of an anchor are not included.
        """
        return self.lag + 2

    @property
    def replicas(self) -> int:
        """Number of engines that the trainer starts."""
        if self.in_trainer or self.address is not None:
            return 0
        return max(1, self.gpus // self.tensor_parallel_size)


def rollout_rules(rollouts: RolloutsConfig) -> list[Rule]:
    """Return the rules, for `refuse_unused`, that refuse keys of `rollouts` without effect."""
    starts_engine = rollouts.replicas > 0
    starts_vllm = starts_engine and rollouts.engine == "vllm"
    service_hint = "the service at rollouts.address has its own value; remove the key"
    no_engine_hint = (
        "the trainer samples without an engine; remove the key, or set rollouts.engine or"
        " rollouts.lag"
    )
    hint = service_hint if rollouts.address is not None else no_engine_hint
    return [
        (starts_engine, "rollouts.gpus", hint),
        (
            starts_vllm,
            "rollouts.tensor_parallel_size rollouts.gpu_memory_share",
            "only a vllm engine started by the trainer uses this key; remove the key",
        ),
        (not rollouts.in_trainer, "rollouts.patience_seconds", no_engine_hint),
        (
            rollouts.lag > 0,
            "rollouts.in_flight",
            "with rollouts.lag = 0 no answer is unfinished when the weights change; remove the key",
        ),
    ]


def in_trainer_rules(rollouts: RolloutsConfig) -> list[tuple[bool, str]]:
    """Return pairs (is accepted, key) for a job whose trainer must sample the answers itself.

    A key is not accepted if its value makes another program sample.
    """
    return [
        (rollouts.engine == "hf", "rollouts.engine"),
        (rollouts.lag == 0, "rollouts.lag"),
        (rollouts.address is None, "rollouts.address"),
    ]
