"""What both ends of a gRPC connection agree on: sizes, keepalive, and which hosts are our own."""

from __future__ import annotations

import ipaddress

MAX_MESSAGE_BYTES = 4 << 20
# Rows are cut into messages of at most this: one long sequence never stalls a stream's others.
MAX_CHUNK_BYTES = 1 << 20
# Of one answer to ListJobs: it stays far below the largest message.
MAX_PAGE_JOBS = 500
# Initial metadata of a stream that may stay quiet: its client knows that the connection stands.
STREAM_OPEN = ("stream", "open")
_MAX_METADATA_BYTES = 8 << 10

_LIMITS = [
    # Also of a compressed message when it is unpacked.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
    # A killed peer is seen at once, a frozen one never without pings: every 30 s, 10 s to answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # While another ping is unanswered, one that measures bandwidth, gRPC sends none of these.
    ("grpc.http2.ping_timeout_ms", 40_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_LIMITS,
    # A restarted server is found again within a second, not after gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Calls go straight to the address that was given: a proxy of the environment is for the web.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    # Of one connection; more streams wait on their side until others end.
    ("grpc.max_concurrent_streams", 1024),
    # Who connects and says nothing is gone after this, not after gRPC's two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: a name or an IP address, without brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
