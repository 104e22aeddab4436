"""Overlap of sampling, scoring and training: seconds a step over those of the slowest stage.

    python -m benchmarks.rollouts.overlap [--out FILE]

The real loop of orders (`RolloutsAhead`), its gRPC client, the rollout service and its schedule;
only the work of the three stages is replaced by waiting: the engine finishes a sequence every G / n
seconds, the teacher scores one at a time in S / n seconds, and the trainer learns from one at a
time in T / n seconds, in the order of the rollouts, as soon as its rows are there. 1.0 is the most
that any schedule can reach. Without lag the three stages follow each other, but for the teacher,
who scores while the engine samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import numpy as np
import torch
from accelerate import Accelerator

from protos import rollouts_pb2_grpc
from protos.rows.codec import RowBlock
from protos.rpc.transport import SERVER_OPTIONS
from student_trainer.data.batch import placeholder_rows
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import SingleTurnRollouts
from student_trainer.rollout_client.order import Order, SamplingSettings, WeightsVersion
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.rollout_service.engines.base import RolloutEngineInfo
from student_trainer.rollout_service.service import RolloutServicer
from student_trainer.rollouts.sampler import SampledTokens

# Seconds of the engine, the teacher and the trainer in a step.
SHAPES = [
    (0.4, 0.4, 0.4),
    (0.8, 0.4, 0.4),
    (0.4, 0.8, 0.4),
    (0.4, 0.4, 0.8),
    (0.8, 0.8, 0.4),
    (0.8, 0.4, 0.8),
    (0.4, 0.8, 0.8),
    (0.8, 0.2, 0.1),
    (0.2, 0.1, 0.8),
]
LAGS = (0, 1, 2)
SEQUENCES, TOKENS, STEPS, WARM_UP = 64, 4, 12, 4
_LATE = 0.005  # seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short shape, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    options = parser.parse_args(arguments)
    rows = []
    for shape in SHAPES[:1] if options.quick else SHAPES:
        steps = {lag: step_seconds(shape, lag) for lag in LAGS}
        shares = {lag: max(shape) / seconds for lag, seconds in steps.items()}
        rows.append({"seconds": shape, "share_of_the_most": shares})
        text = "  ".join(f"lag {lag}: {share:.3f}" for lag, share in shares.items())
        print(f"engine {shape[0]}, teacher {shape[1]}, trainer {shape[2]} s:  {text}", flush=True)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}",
        "workload": {"sequences": SEQUENCES, "steps": STEPS},
        "shapes": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def step_seconds(
    shape: tuple[float, float, float], lag: int, *, steps: int = STEPS, warm_up: int = WARM_UP
) -> float:
    """Return the median seconds of a step after the first ones."""
    sampling, scoring, training = (seconds / SEQUENCES for seconds in shape)
    settings = SamplingSettings(1, 1.0, 0, 0, TOKENS, 1 << 20)
    with serve(TimedEngine(sampling)) as address, EngineClient([address]) as client:
        ahead = RolloutsAhead(
            Accelerator(cpu=True),
            client,
            EmptyChannel(),
            TimedTeacher(scoring),
            SingleTurnRollouts(client, settings, no_evaluation),
            lag=lag,
            last_step=steps,
        )
        ended = [time.monotonic()]
        for step in range(1, steps + 1):
            clock = Clock(training)
            for item in ahead.of_step(step, prompts_of_step):
                item.wait()
                clock.work()
            ended.append(time.monotonic())
    seconds: list[float] = np.diff(ended)[warm_up:].tolist()
    return statistics.median(seconds)


def no_evaluation() -> WeightsVersion:
    """Fail: nothing is evaluated here."""
    raise AssertionError


def prompts_of_step(step: int) -> tuple[Sequence[Prompt], Sequence[int]]:
    """Return the prompts of a step."""
    prompt = Prompt(np.array([1, 2, 3], np.int32), "")
    return [prompt] * SEQUENCES, range(step * SEQUENCES, (step + 1) * SEQUENCES)


class Clock:
    """Works without a break, as long as there is work; sleeps in place of it.

    A sleep ends a little late. Work that begins less than _LATE after the work before it counts as
    begun in time, so that the lateness of many short sleeps does not add up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free = time.monotonic()

    def end_of_work(self) -> float:
        """Return when a piece of work that arrives now is done."""
        now = time.monotonic()
        begin = self._free if now - self._free < _LATE else now
        self._free = begin + self._seconds
        return self._free

    def work(self) -> None:
        """Do a piece of work."""
        time.sleep(max(0.0, self.end_of_work() - time.monotonic()))


class TimedTeacher:
    """A teacher that scores one sequence at a time."""

    any_time = True

    def __init__(self, seconds: float) -> None:
        self._clock = Clock(seconds)
        self._lock = threading.Lock()

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Return rows that are complete when the teacher has scored them."""
        future: Future[RowBlock] = Future()
        rows = placeholder_rows(rollout.head_ids.numpy())
        with self._lock:
            delay = self._clock.end_of_work() - time.monotonic()
        threading.Timer(delay, future.set_result, [rows]).start()
        return future

    def finish(self) -> None:
        """Do nothing."""


class EmptyChannel:
    """Versions of weights that do not exist."""

    @property
    def newest(self) -> WeightsVersion:
        """Return the first version."""
        return self.publish(0)

    def publish(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Return the version."""
        return WeightsVersion("benchmark", number, Path(f"/version-{number}"))

    def delete_before(self, number: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TimedEngine:
    """An engine that finishes one sequence after the other."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self.info = RolloutEngineInfo("hf", "-", 100, None, "float32", "cpu", ("drain",))

    async def load(self, version: WeightsVersion) -> None:
        """Do nothing."""

    async def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Yield the sequences of an order at equal distances."""
        async with self._turn:
            clock = Clock(self._seconds)
            for index in range(len(order.sequences)):
                await asyncio.sleep(max(0.0, clock.end_of_work() - time.monotonic()))
                ids = torch.ones(TOKENS, dtype=torch.long)
                span = (order.weights.number, TOKENS)
                yield (
                    index,
                    SampledTokens(
                        ids, ids[:, None].int(), torch.zeros(TOKENS), False, False, None, (span,)
                    ),
                )

    async def sleep(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@contextmanager
def serve(engine: TimedEngine) -> Iterator[str]:
    """Serve the engine in a thread; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        rollouts_pb2_grpc.add_RolloutsServicer_to_server(RolloutServicer(engine), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    run: Callable[..., object] = asyncio.run_coroutine_threadsafe
    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        run(server.stop(None), loop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    main()
