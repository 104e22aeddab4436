"""python -m student_trainer.rewards FD: the program of the child process of `judge.py`.

FD is the file descriptor of a socket. The program reads one JSON line per request and answers with
one JSON line: first the configuration, then answers to score.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sys
from typing import Any

from clients.config.tables.reward import RewardConfig
from protos.errors import DistillError, InternalFault
from student_trainer.rewards.sample import RewardSample
from student_trainer.rewards.scorers import RewardScorer, make_scorer

# Algebra on a model's text can use all memory. A user's function has no limit: it may need memory.
_MAX_ALGEBRA_BYTES = 16 << 30


def main() -> None:
    """Answer requests until the socket is closed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one such process runs per core
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with channel, channel.makefile("r", encoding="utf-8") as lines:
        config = RewardConfig.model_validate_json(json.loads(next(lines))["config"])
        if config.type != "python":
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_ALGEBRA_BYTES, _MAX_ALGEBRA_BYTES))
        try:
            scorer = make_scorer(config)
        except Exception as error:
            _send(channel, _describe_refusal(error))
            return
        _send(channel, {})
        for line in lines:
            # If the trainer is killed, nothing else would end a request that never finishes.
            signal.setitimer(signal.ITIMER_REAL, config.timeout_seconds + 5)
            _send(channel, _answer_request(scorer, json.loads(line)))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _answer_request(scorer: RewardScorer, message: dict[str, Any]) -> dict[str, Any]:
    sample = RewardSample(**message["sample"])
    try:
        if message["what"] == "vote":
            return {"found": scorer.vote(sample)}
        value = scorer.score(sample)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        return {"error": f"the reward raised {type(error).__name__}: {str(error)[:500]}"}
    if not math.isfinite(value):
        return {"error": f"the reward returned {value}, which is not a finite number"}
    return {"found": value}


def _describe_refusal(error: Exception) -> dict[str, str]:
    fault = error if isinstance(error, DistillError) else InternalFault(repr(error))
    return {"fault": fault.message, "field": fault.field, "hint": fault.hint}


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
