"""The life of a started teacher without its server, on a simulated clock."""

from __future__ import annotations

import os
from pathlib import Path

from distill_server.runners.local.lease import Lease


def test_a_lease_lasts_as_long_as_server_or_trainers(tmp_path: Path) -> None:
    now, file = 0.0, tmp_path / ".teachers" / "key" / "lease"
    heartbeat = tmp_path / "job" / "logs" / "attempt-1" / "heartbeat"
    own_heartbeat = file.with_name("logs") / "attempt-1" / "heartbeat"
    for path in (file, heartbeat, own_heartbeat):
        path.parent.mkdir(parents=True)

    def touch(path: Path) -> None:
        path.touch()
        os.utime(path, ns=(0, int(1e9 * now) + 1))

    lease = Lease(file, tmp_path, 10.0, clock=lambda: now)

    def follow(seconds: int, *touched: Path) -> list[bool]:
        """Return whether the lease is over after each second, in which files are touched."""
        nonlocal now
        results = []
        for _ in range(seconds):
            now += 1
            for path in touched:
                touch(path)
            results.append(lease.is_over())
        return results

    assert not any(follow(100, file, heartbeat, own_heartbeat)), "the server polls it"
    assert not any(follow(100, heartbeat, own_heartbeat)), "a trainer runs"
    over = follow(30, own_heartbeat)
    assert over.index(True) in range(10, 22), "one lease after the last trainer was seen"
    assert not any(follow(5, file)), "a server is back"
    now += 1e6  # this process was stopped, and the server not
    touch(file)
    assert not lease.is_over()
