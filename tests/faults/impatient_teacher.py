"""`distill-teacher` that pings its clients ten times as often as by default."""

from __future__ import annotations

from protos.rpc import transport

SCALED = {
    "grpc.keepalive_time_ms": 3_000,
    "grpc.keepalive_timeout_ms": 1_000,
    "grpc.http2.ping_timeout_ms": 1_000,
}

if __name__ == "__main__":
    transport.SERVER_OPTIONS[:] = [
        (name, SCALED.get(str(name), value)) for name, value in transport.SERVER_OPTIONS
    ]
    from teacher_service.__main__ import main

    main()
