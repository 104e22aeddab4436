"""python -m tests.clients.data.fuzzing: run cases, and print those that fail.

A case is a function of the seed and its number. With --state, a later call goes on after the last
one; the file has a line for every hundred cases, and one for each case that fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tests.clients.data.fuzzing.cases import run_case

CASES_PER_ENTRY = 100  # of the state file


def main(arguments: list[str] | None = None) -> int:
    """Return the number of cases that fail, at most 100."""
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--state", type=Path, help="file to go on from")
    options = parser.parse_args(arguments)
    first, failed, outcomes = options.first, 0, Counter[str]()
    state = options.state if options.state and options.state.exists() else None
    for line in state.read_text().splitlines() if state else ():
        entry = json.loads(line)
        if entry["seed"] == options.seed:
            failed += "failure" in entry
            first = max(first, entry.get("next", 0))
            outcomes = Counter(entry.get("outcomes", outcomes))
    for number in range(first, options.first + options.count):
        try:
            outcomes[run_case(options.seed, number)] += 1
        except Exception as error:
            failed += 1
            entry = {"case": number, "failure": f"{type(error).__name__}: {error}"[:2000]}
            print(json.dumps(entry), flush=True)
            _append(options.state, options.seed, entry)
        if (number + 1) % CASES_PER_ENTRY == 0:
            _append(options.state, options.seed, {"next": number + 1, "outcomes": outcomes})
    print(json.dumps({"seed": options.seed, "failed": failed, **dict(sorted(outcomes.items()))}))
    return min(failed, 100)


def _append(state: Path | None, seed: int, entry: dict[str, object]) -> None:
    if state is not None:
        with state.open("a") as file:
            file.write(json.dumps({"seed": seed, **entry}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
