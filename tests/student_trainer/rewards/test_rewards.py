"""Answers that cannot be judged are counted, and never end the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clients.config.tables.reward import LengthPenalty, RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards import Rewards, RewardSample, length_penalty

# The answer selects what happens to the judge's process.
FUNCTION = """
import os, signal, subprocess, sys, time
print("what is printed is in nobody's way")
def reward(prompt, answer, reference, fields):
    print(os.getpid())
    match answer:
        case "raise": raise KeyError("no")
        case "exit": sys.exit(0)
        case "die": os._exit(3)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "nan": return float("nan")
        case "text": return "much"
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(60)
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(fields["pid"], "w").write(str(child.pid))
            child.wait()
    return float(answer)
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewards]:
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(FUNCTION)
    config = RewardConfig(type="python", file=str(file), timeout_seconds=1.0)
    with Rewards(config, judges=2) as rewards:
        yield rewards


def test_every_way_to_fail_costs_one_reward(rewards: Rewards) -> None:
    ways = {
        "raise": "the reward raised KeyError: 'no'",
        "exit": "the reward raised SystemExit: 0",
        "die": "the process of the reward ended (the process closed the connection)",
        "kill": "the process of the reward ended",
        "nan": "the reward returned nan, which is not a finite number",
        "text": "the reward raised ValueError: could not convert string to float: 'much'",
        "hang": "the reward took more than 1 s",
    }
    samples = [RewardSample("", text) for way in ways for text in (way, "2.5")]
    scores = rewards(samples)
    np.testing.assert_array_equal(scores.values, [np.nan, 2.5] * len(ways))
    assert scores.errors == len(ways)
    for fault, expected in zip(scores.faults, ways.values(), strict=True):
        assert fault.startswith(expected)


FORKS = """
import json, os, stat, sys, time
def connection():
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return descriptor
        except OSError:
            pass
def reward(prompt, answer, reference, fields):
    way, _, value = answer.partition(" ")
    if way == "child" and os.fork() == 0:
        return -1.0  # as a pool whose initializer fails, or a forgotten os._exit
    if way == "parent" and os.fork() > 0:
        time.sleep(0.2)
    if way == "exits" and os.fork() == 0:
        sys.exit(0)
    if way == "repeats":
        os.write(connection(), b'{"number": 1, "value": -7}' + bytes([10]))
    if way == "writes":
        os.write(connection(), b"no reply" + bytes([10]))
    return float(value)
"""


def test_replies_are_those_of_their_answers(tmp_path: Path) -> None:
    """Whatever the function forks or writes, no answer has the reward of another."""
    file = tmp_path / "mine.py"
    file.write_text(FORKS)
    config = RewardConfig(type="python", file=str(file), timeout_seconds=20)
    ways = ["child", "parent", "exits", "repeats", "plain"]
    samples = [RewardSample("", f"{ways[n % len(ways)]} {n}") for n in range(25)]
    with Rewards(config, judges=1) as rewards:
        assert rewards(samples).values.tolist() == [*range(25)]
        disturbed = rewards([RewardSample("", "writes 1"), RewardSample("", "plain 2")])
    np.testing.assert_array_equal(disturbed.values, [np.nan, 2.0])
    assert disturbed.faults == ("the reward wrote to the connection of its process",)


def test_long_answers_do_not_fill_a_pipe(rewards: Rewards) -> None:
    prompt = "x" * (1 << 20)  # more than a socket holds
    assert rewards([RewardSample(prompt, "1"), RewardSample(prompt, "2")]).values.tolist() == [
        1.0,
        2.0,
    ]


def test_what_a_function_started_ends_with_it(rewards: Rewards, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert rewards([RewardSample("", "child", fields={"pid": str(pid)})]).errors == 1
    wait_until_gone(int(pid.read_text()))


def test_no_samples(rewards: Rewards) -> None:
    assert rewards([]).values.shape == (0,)


def test_pattern_that_backtracks_for_ever_is_left() -> None:
    config = RewardConfig(type="regex", pattern="(a+)+b", timeout_seconds=0.5)
    with Rewards(config, judges=1) as rewards:
        scores = rewards([RewardSample("", "a" * 60 + "c", "a"), RewardSample("", "aab", "aa")])
    np.testing.assert_array_equal(scores.values, [np.nan, 1.0])
    assert scores.faults == ("the reward took more than 0.5 s",)


def test_reward_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    config = RewardConfig(type="python", file=str(tmp_path / "missing.py"))
    with pytest.raises(InvalidInput, match=r"missing\.py cannot be loaded: FileNotFoundError"):
        Rewards(config, judges=1)


def test_judges_end_with_a_killed_trainer(tmp_path: Path) -> None:
    """A judge that hangs in the function is ended by its own alarm."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "def reward(prompt, answer, reference, fields):\n"
        "    pathlib.Path(answer).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    pid = tmp_path / "pid"
    trainer = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys; from student_trainer.rewards import *\n"
            "from clients.config.tables.reward import RewardConfig\n"
            "config = RewardConfig(type='python', file=sys.argv[1], timeout_seconds=2)\n"
            "Rewards(config, 1)([RewardSample('', sys.argv[2])])",
            *(str(tmp_path / "mine.py"), str(pid)),
        ]
    )
    try:
        while not (pid.exists() and pid.read_text()):
            assert trainer.poll() is None
            time.sleep(0.02)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_until_gone(int(pid.read_text()))


def wait_until_gone(pid: int) -> None:
    """Only the test's timeout applies. A zombie counts as gone, as its new parent may be slow."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists():
        try:
            os.kill(pid, 0)
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)


def test_length_penalty() -> None:
    length = LengthPenalty(free_tokens=100, max_tokens=300, weight=0.5)
    penalties = [length_penalty(tokens, length) for tokens in (0, 100, 101, 200, 300, 900)]
    assert penalties == [0, 0, 0.0025, 0.25, 0.5, 0.5]
    with Rewards(RewardConfig(type="exact_match", length=length), judges=1) as rewards:
        samples = [RewardSample("", "4", "4", tokens=200), RewardSample("", "5", "4", tokens=999)]
        assert rewards(samples).values.tolist() == [0.75, -0.5]
