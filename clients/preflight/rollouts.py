"""Checks of a job's rollout engines: their GPUs, and the services at `rollouts.address`."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import grpc

from clients.config.tables.job import JobConfig
from clients.preflight.limits import check_lengths
from clients.runs.started_services import PLACED_VARIABLE as PLACED
from protos import rollouts_pb2, rollouts_pb2_grpc
from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    TimedOut,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from protos.rpc.channel import ROLLOUTS_TOKEN, open_channel
from protos.rpc.statuses import fault_of
from protos.rpc.transport import ROLLOUTS_PROTOCOL

log = logging.getLogger(__name__)

FIELD = "rollouts.address"
_SECONDS = 5.0


def gpus_here() -> list[str]:
    """Return the names of the visible GPUs, as CUDA_VISIBLE_DEVICES selects them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]
    return [name.strip() for name in listed.split(",") if name.strip()]


def check_gpus(config: JobConfig) -> None:
    """Raise InvalidInput if this machine has too few GPUs for the trainer and `rollouts.gpus`.

    Engines on a cluster are not checked.
    """
    if not config.engine_gpus or PLACED in os.environ:
        return
    trainer_gpus, engine_gpus = config.processes, config.engine_gpus
    available_gpus = len(gpus_here())
    if available_gpus < trainer_gpus + engine_gpus:
        raise InvalidInput(
            f"the machine has {available_gpus} GPUs, but train.processes needs {trainer_gpus}"
            f" and the engine {engine_gpus} more",
            field="rollouts.gpus",
            hint="reduce one of the keys, or omit rollouts.gpus to share the trainer's GPUs",
        )


def not_rollouts(address: str) -> InvalidInput:
    """Return the error for an address where the server is not a rollout service."""
    return InvalidInput(
        f"the server at {address} is not a rollout service",
        field=FIELD,
        hint="give the HOST:PORT that distill-rollouts printed",
    )


def check_protocol(address: str, protocol: int) -> None:
    """Raise WrongState if a service has another protocol version than this program.

    `address`: the address of the service. `protocol`: its version.
    """
    if protocol != ROLLOUTS_PROTOCOL:
        raise WrongState(
            f"the rollout service at {address} has another version of distill-service: it has"
            f" protocol {protocol}, the job has {ROLLOUTS_PROTOCOL}",
            field=FIELD,
            hint="start the service with the version of distill-service that runs the job",
        )


def another_engine(engine: str, requested: str) -> WrongState:
    """Return the error for a service whose engine is not the engine of the job."""
    return WrongState(
        f"the service at rollouts.address has the engine {engine}, the job requests {requested}",
        field="rollouts.engine",
        hint=f"set rollouts.engine = '{engine}', or start the service with --engine {requested}",
    )


def check_rollouts(config: JobConfig, *, scope: str) -> None:
    """Check the services at `rollouts.address`, if the job has any. Waits at most 5 s.

    `scope`: see `open_channel`. A service that does not answer is logged.

    Raises Unavailable if no service answers. Raises InvalidInput if a server is not a rollout
    service, or if the job has longer sequences than the service accepts. Raises WrongState if a
    service refuses the token, or has another engine or protocol than the job.
    """
    engine = config.rollout_engine
    if engine is None or engine.address is None:
        return
    configured_addresses = engine.address
    addresses = (
        [configured_addresses] if isinstance(configured_addresses, str) else configured_addresses
    )
    faults: list[DistillError] = []
    with ExitStack() as stack:
        calls = [stack.enter_context(_InfoCall(address, scope)) for address in addresses]
        for address, call in zip(addresses, calls, strict=True):
            try:
                info = call.answer()
            except (Unavailable, TimedOut) as error:
                faults.append(error)
                continue
            check_protocol(address, info.protocol)
            if info.engine != engine.engine:
                raise another_engine(info.engine, engine.engine)
            label = f"rollout service at {address}"
            check_lengths(config, label, info.max_length or None)
    if len(faults) == len(addresses):
        raise Unavailable(
            f"no rollout service answers at {', '.join(addresses)} ({faults[0].message})",
            field=FIELD,
            hint=faults[0].hint or "start a service with distill-rollouts, or check the address",
        )
    for fault in faults:
        log.warning("%s", fault)


class _InfoCall(ExitStack):
    """A running request for the info of one service. The method `answer` waits for the result."""

    def __init__(self, address: str, scope: str) -> None:
        super().__init__()
        self._address = address
        try:
            channel = open_channel(address, token=ROLLOUTS_TOKEN, scope=scope)
        except InvalidInput as error:
            raise InvalidInput(error.message, field=FIELD, hint=error.hint) from error
        self.enter_context(channel)
        stub = rollouts_pb2_grpc.RolloutsStub(channel)
        request = rollouts_pb2.GetRolloutInfoRequest()
        self._call = stub.GetRolloutInfo.future(request, timeout=_SECONDS, wait_for_ready=True)

    def answer(self) -> rollouts_pb2.RolloutInfo:
        """Wait for the info of the service, and return it. Raises the error of the request."""
        try:
            return self._call.result()
        except grpc.RpcError as error:
            if self._call.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise not_rollouts(self._address) from error
            fault = fault_of(error, f"rollout service at {self._address}")
            if isinstance(fault, Unauthenticated | Forbidden):
                # WrongState, not Unauthenticated: the token of the submitter is valid.
                raise WrongState(
                    f"the rollout service at {self._address} does not accept the token of the"
                    f" distill server",
                    field=FIELD,
                    hint="start the distill server with $DISTILL_ROLLOUTS_TOKEN set to a token of"
                    " role admin of the rollout service",
                ) from error
            raise fault from error
