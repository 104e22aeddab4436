"""The real server, its dashboard and the scripted trainer: RUNS PATIENCE_SECONDS PORT SLOTS [URL].

Tokens are read from $DISTILL_TOKENS, as for any server. URL is the address of a proxy.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from distill_server.dashboard.serve import Dashboard
from distill_server.jobs.preflight import accept_all
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Machine
from distill_server.scheduler import Policy
from distill_server.server import run_server
from protos.auth.access import read_tokens
from protos.rpc.http_server import HttpLimits
from protos.rpc.server import ServerEndpoint
from tests.distill_server.scripted_server import POLICY, command


def main() -> None:
    logging.basicConfig()
    asyncio.run(
        run_server(
            Path(sys.argv[1]),
            endpoint=ServerEndpoint(tokens=read_tokens(None)),
            runner=LocalRunner(command=command),
            policy=Policy(Machine(slots=int(sys.argv[4])), retries=1, **POLICY),
            preflight=accept_all,
            on_ready=lambda bound: print(bound, flush=True),
            dashboard=Dashboard(
                int(sys.argv[3]),
                external_url=sys.argv[5] if len(sys.argv) > 5 else "",
                on_ready=lambda url: print(url, flush=True),
                limits=HttpLimits(patience=float(sys.argv[2])),
            ),
        )
    )


if __name__ == "__main__":
    main()
