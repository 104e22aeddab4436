"""The program of the child process of `judge.py`: python -m student_trainer.rewards FD.

FD is the file descriptor of a socket. Each request is one JSON line. The first request contains the
configuration of the reward, all others contain an answer to score. The reply to each request is one
JSON line, which has the number of the request.
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
        first = json.loads(next(lines))
        config = RewardConfig.model_validate_json(first["config"])
        if config.type != "python":
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_ALGEBRA_BYTES, _MAX_ALGEBRA_BYTES))
        try:
            scorer = make_scorer(config)
        except Exception as error:  # noqa: BLE001 (the parent raises it)
            _send(channel, first, _describe_refusal(error))
            return
        _send(channel, first, {})
        process = os.getpid()
        for line in lines:
            request = json.loads(line)
            # If the trainer is killed, nothing else would end a request that never finishes.
            signal.setitimer(signal.ITIMER_REAL, config.timeout_seconds + 5)
            reply = _answer_request(scorer, request)
            if os.getpid() != process:  # a fork by the user's code must not reply
                os._exit(0)
            _send(channel, request, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)


def _answer_request(scorer: RewardScorer, message: dict[str, Any]) -> dict[str, Any]:
    sample = RewardSample(**message["sample"])
    try:
        if message["what"] == "vote":
            return {"value": scorer.vote(sample)}
        value = scorer.score(sample)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever the user's code raises)
        return {"error": f"the reward raised {type(error).__name__}: {str(error)[:500]}"}
    if not math.isfinite(value):
        return {"error": f"the reward returned {value}, which is not a finite number"}
    return {"value": value}


def _describe_refusal(error: Exception) -> dict[str, str]:
    fault = error if isinstance(error, DistillError) else InternalFault(repr(error))
    return {"fault": fault.message, "field": fault.field, "hint": fault.hint}


def _send(channel: socket.socket, request: dict[str, Any], reply: dict[str, Any]) -> None:
    channel.sendall(json.dumps({"number": request["number"], **reply}).encode() + b"\n")


if __name__ == "__main__":
    main()
