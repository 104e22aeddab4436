"""A teacher under load does not grow, and the test detects one that leaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from tests.faults.leaking_teacher import LEAK
from tests.faults.memory_growth import bytes_per_query, new_queries, slope
from tests.faults.sequences import fake
from tests.teacher_service.conftest import StartTeacher

pytestmark = pytest.mark.slow

Ask = Callable[[int], list[ScoreQuery]]
# A quarter of the planted leak: allocator noise is well below it.
BOUND = LEAK / 4


def always_new() -> Ask:
    rng = np.random.default_rng(0)
    return lambda count: new_queries(count, rng)


def always_the_same() -> Ask:
    queries = itertools.cycle(new_queries(200, np.random.default_rng(0)))
    return lambda count: list(itertools.islice(queries, count))


def growth(start: StartTeacher, ask: Ask, *cache: str, module: str = "teacher_service") -> float:
    teacher = start(*fake(), *cache, module=module, launched=True)
    bytes_grown = bytes_per_query(teacher, ask, rounds=24, queries_per_round=500)
    print(f"{bytes_grown:+.0f} bytes a query")
    return bytes_grown


def test_a_planted_leak_is_found(start_teacher: StartTeacher) -> None:
    leaking = "tests.faults.leaking_teacher"
    bytes_grown = growth(start_teacher, always_new(), "--no-cache", module=leaking)
    assert LEAK * 0.75 <= bytes_grown <= LEAK * 2


def test_what_is_scored_leaves_nothing(start_teacher: StartTeacher) -> None:
    assert growth(start_teacher, always_new(), "--no-cache") < BOUND


def test_what_the_cache_answers_leaves_nothing(start_teacher: StartTeacher) -> None:
    assert growth(start_teacher, always_the_same(), "--cache-memory-mib", "0") < BOUND


def test_the_slope_of_a_line_with_steps() -> None:
    counts = np.arange(40.0)
    sizes = 3 * counts
    sizes[17:20] -= 1e6
    assert slope(list(counts), list(sizes)) == 3
