"""A caller that takes no answer, in its own process, so that resident memory is the client's.

    python -m tests.faults.untaken HOST:PORT LIMIT_BYTES

prints one JSON object: number of answers, bytes of their rows, bytes that the client says it holds
before and after all are taken, and the growth of resident memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import psutil

from clients.teacher.client import TeacherClient
from protos.rows.codec import RowBlock
from tests.faults.sequences import WAIT, sequences


def main(address: str, limit: int) -> dict[str, int]:
    queries = sequences(150, 1000, seed=3)  # 520 KB of rows each
    with TeacherClient(address, max_prefetch_bytes=limit) as client:
        client.submit(queries[0]).result(WAIT)
        resident = resident_bytes()
        answers = [client.submit(query) for query in queries]
        answer_count = -1
        while (
            answer_count != (answer_count := sum(answer.done() for answer in answers))
            or not answer_count
        ):
            time.sleep(1)
        grown = resident_bytes() - resident
        held_before = client.held_bytes
        assert all(len(answer.result(WAIT)) == 999 for answer in answers)
        rows = answer_count * nbytes(answers[0].result())
        held_after = client.held_bytes
    return {
        "answers": answer_count,
        "rows": rows,
        "held": held_before,
        "left": held_after,
        "grown": grown,
    }


def resident_bytes() -> int:
    """Return resident bytes after returning freed memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def nbytes(rows: RowBlock) -> int:
    assert rows.head_ids is not None
    arrays = (rows.head_ids, rows.head_logprobs, rows.tail_logmass, rows.token_logprobs)
    return sum(array.nbytes for array in arrays)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
