"""The memory of a process that loads many versions of weights into an engine of vLLM.

    python -m tests.vllm.rollout_memory DIRECTORY LOADS

Prints {"bytes_of_weights": ..., "bytes_used": [one figure per load]} as its last line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from tests.vllm.rollouts import Service, Student, order_of, prompts

WARM_UP = 10


def resident(process: psutil.Process) -> int:
    """Bytes of this process and its children, without mapped files, which snapshots are."""
    processes = [process, *process.children(recursive=True)]
    return sum(
        child_process.memory_info().rss - child_process.memory_info().shared
        for child_process in processes
    )


def main(directory: Path, loads: int) -> None:
    student = Student(directory, vocab_size=32_000)
    service = Service(student.path)
    versions = [student.snapshot()]
    student.learn()
    versions.append(student.snapshot())
    used = []
    try:
        for turn in range(WARM_UP + loads):
            version = versions[turn % 2]
            service.load(version)
            service.sample(order_of(version, prompts(4, 20), 8))
            used.append(resident(psutil.Process()))
    finally:
        service.close()
    size = sum(weight.nbytes for weight in student.weights().values())
    print(json.dumps({"bytes_of_weights": size, "bytes_used": used[WARM_UP:]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
