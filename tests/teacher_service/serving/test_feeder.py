"""The feeder with a scripted engine: tokens in flight, turns, cancellation, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, DistillError, Unavailable
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ContinuousEngine, QuerySchedule
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.fair_queue import EngineAnswer, Sender
from teacher_service.serving.feeder import Feeder

STEP = 10


class ScriptedEngine(FakeEngine):
    """Answers a query when the test lets it; crashes on token 9, refuses token 8."""

    step_tokens = STEP

    def __init__(self) -> None:
        super().__init__(FakeSettings(vocab=16, crash_token=9, nan_token=8))
        self.running: dict[int, asyncio.Event] = {}
        self.begun_tokens: list[int] = []  # first token of each query
        self.turns: list[int] = []
        self.schedules: list[QuerySchedule] = []
        self.cancelled: list[int] = []
        self.most_tokens = 0
        self._tokens = 0
        self.hold = True

    async def score_one(self, query: ScoreQuery, turn: QuerySchedule) -> RowBlock:
        number, name = len(self.begun_tokens), int(query.token_ids[0])
        self.begun_tokens.append(name)
        self.turns.append(turn.number)
        self.schedules.append(turn)
        self._tokens += len(query.token_ids)
        self.most_tokens = max(self.most_tokens, self._tokens)
        self.running[number] = asyncio.Event()
        try:
            if self.hold:
                await self.running[number].wait()
            (answer,) = self.score([query])
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self.running[number]
            self._tokens -= len(query.token_ids)
        if isinstance(answer, DistillError):
            raise answer
        return answer

    def end_first(self) -> None:
        """Let the query that has run longest end."""
        self.running[min(self.running)].set()


def query(*ids: int) -> ScoreQuery:
    return ScoreQuery(np.array(ids, np.int32), 1, top_k=2)


def run(main: Callable[[ScriptedEngine, Feeder], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        engine = ScriptedEngine()
        assert isinstance(engine, ContinuousEngine)
        async with Feeder(engine) as feeder:
            await main(engine, feeder)

    asyncio.run(asyncio.wait_for(within(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def begin(feeder: Feeder, sender: Sender, *ids: int) -> asyncio.Task[EngineAnswer]:
    return asyncio.create_task(feeder.score(query(*ids), sender))


def test_four_steps_of_tokens_are_in_flight_and_no_query_waits_for_another_to_end() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        sender = Sender()
        answers = [begin(feeder, sender, 1, 1, 1) for _ in range(30)]
        for ended in range(30):
            running = min(14, 30 - ended)  # 42 tokens: the last one is admitted at 39
            await until(lambda running=running: len(engine.running) == running)  # type: ignore[misc]
            engine.end_first()
            await until(lambda ended=ended: sum(a.done() for a in answers) > ended)  # type: ignore[misc]
        assert engine.most_tokens == 42

    run(main)


def test_a_long_query_leaves_no_step_half_empty() -> None:
    """The next query in turn is longer than what is left of four steps: it is admitted."""

    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        sender = Sender()
        answers = [begin(feeder, sender, *[1] * n) for n in (31, 25, 4, 7)]
        await until(lambda: len(engine.running) == 2)
        assert engine.most_tokens == 56
        engine.end_first()  # 25 tokens are left
        await until(lambda: answers[0].done() and len(engine.running) == 3)
        for event in engine.running.values():
            event.set()
        await asyncio.gather(*answers)

    run(main)


def test_a_light_client_is_next_whatever_waits() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        heavy, capture, light = Sender(), Sender(is_background=True), Sender()
        answers = [begin(feeder, capture, 2, 2, 2, 2) for _ in range(3)]
        answers += [begin(feeder, heavy, 1, 1, 1, 1) for _ in range(128)]
        await until(lambda: len(engine.running) == 10)
        engine.end_first()
        await until(lambda: len(engine.begun_tokens) == 11)
        late = [begin(feeder, light, 3, 3) for _ in range(2)]
        await until(lambda: 3 in engine.begun_tokens)
        assert engine.begun_tokens[11:] == [3], (
            "one query goes past full steps, the other one waits"
        )
        assert engine.turns[11] == engine.turns[0], "where the engine is"
        assert max(engine.turns[1:11]) > engine.turns[11], "before what the engine has not begun"
        answers += late
        engine.hold = False
        for running in engine.running.values():
            running.set()
        await asyncio.gather(*answers)
        assert engine.begun_tokens[-3:] == [2, 2, 2], "a capture comes last"
        assert min(engine.turns[-3:]) > max(engine.turns[:-3])

    run(main)


def test_steps_are_short_beside_a_client_that_asks_singly() -> None:
    """Steps have as many tokens as its queries, as long as others have queries, too."""

    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        heavy, light = Sender(), Sender()
        answers = [begin(feeder, heavy, 1, 1, 1, 1) for _ in range(40)]
        await until(lambda: len(engine.running) == 10)
        for count in range(3):
            light_answers = begin(feeder, light, 3, 3, 3)
            await until(lambda count=count: engine.begun_tokens.count(3) == count + 1)  # type: ignore[misc]
            # Whether it asks singly is known from its second query on.
            expected = (3, True) if count else (0, False)
            assert (engine.schedules[-1].step_tokens, engine.schedules[-1].single) == expected
            engine.running[len(engine.begun_tokens) - 1].set()
            await light_answers
        engine.end_first()
        await until(lambda: engine.begun_tokens[-1] == 1)
        assert engine.schedules[-1] == QuerySchedule(engine.turns[-1], 3, single=False)
        two = [begin(feeder, light, 3, 3) for _ in range(2)]
        await until(lambda: engine.begun_tokens[-1] == 3)
        assert not engine.schedules[-1].single, "two at the same time"
        feeder._short_until = 0.0  # a second later
        for running in [*engine.running.values()][:4]:
            running.set()
        await until(lambda: engine.begun_tokens[-1] == 1)
        assert engine.schedules[-1].step_tokens == 0
        engine.hold = False
        for running in engine.running.values():
            running.set()
        await asyncio.gather(*answers, *two)

    run(main)


def test_steps_are_full_where_every_client_asks_singly() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        engine.hold = False
        senders = [Sender() for _ in range(8)]
        for _ in range(3):
            await asyncio.gather(*(begin(feeder, sender, 3, 3) for sender in senders))
        assert {turn.step_tokens for turn in engine.schedules} == {0}

    run(main)


def test_what_is_cancelled_leaves_the_queue_and_the_engine() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        running = [begin(feeder, Sender(), n, *[1] * 9) for n in (1, 2)]
        await until(lambda: len(engine.running) == 2)
        waiting = begin(feeder, Sender(), 3, 3)
        second_answer = begin(feeder, Sender(), 4, 4)
        await until(lambda: feeder.queued_tokens == 4)
        waiting.cancel()
        running[0].cancel()
        await until(lambda: engine.begun_tokens == [1, 2, 4])
        assert engine.cancelled == [1]
        for event in engine.running.values():
            event.set()
        await asyncio.gather(second_answer, running[1])
        assert feeder.queued_tokens == 0

    run(main)


def test_a_query_fails_alone_and_the_engine_goes_on() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        engine.hold = False
        for _ in range(3):
            queries = [query(1, 2, 3), query(1, 9, 3), query(8, 1, 2)]
            fine, crashed, refused = await asyncio.gather(
                *map(feeder.score, queries), return_exceptions=True
            )
            assert isinstance(fine, EngineAnswer)
            assert isinstance(crashed, RuntimeError)
            assert isinstance(refused, Corrupt)
        assert not feeder.broken

    run(main)


def test_chance_gets_a_second_try() -> None:
    async def main(engine: ScriptedEngine, feeder: Feeder) -> None:
        engine.hold = False
        plain, tries = engine.score, 0

        def unlucky(queries: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise MemoryError("once")
            return plain(queries)

        engine.score = unlucky  # type: ignore[method-assign]
        assert len((await feeder.score(query(1, 2, 3))).block) == 2

    run(main)


def test_an_engine_that_always_fails_is_broken() -> None:
    async def main() -> None:
        engine, broken_calls = ScriptedEngine(), []
        engine.hold = False

        def fail(_: object) -> Any:
            raise RuntimeError("the engine is dead")

        engine.score = fail  # type: ignore[method-assign]
        async with Feeder(engine, on_broken=lambda: broken_calls.append("broken")) as feeder:
            many = (feeder.score(query(1, 2)) for _ in range(50))
            answers = await asyncio.gather(*many, return_exceptions=True)
            assert broken_calls == ["broken"]
            assert sum(isinstance(answer, Unavailable) for answer in answers) >= 40
            with pytest.raises(Unavailable):
                await feeder.score(query(1, 2))

    asyncio.run(asyncio.wait_for(main(), 60))
