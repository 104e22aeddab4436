"""Settings that clients and servers share: protocol version, message sizes, keepalive, retries."""

from __future__ import annotations

import ipaddress
import random
import socket

# The version of the things that a trainer and a rollout service must have in common: the messages,
# the files of a snapshot, and the tokens that follow from a seed and a rollout number. If one of
# these changes and the version does not, a test fails.
ROLLOUTS_PROTOCOL = 4
MAX_MESSAGE_BYTES = 4 << 20
# Largest request of rows. A request that is longer than MAX_MESSAGE_BYTES is sent in several
# messages. At k = 64, the largest request has a sequence of 262,000 tokens.
MAX_REQUEST_BYTES = 64 << 20
# Largest chunk of rows in one message, so that a long sequence never delays other sequences of the
# stream for long.
MAX_CHUNK_BYTES = 1 << 20
# Maximum number of jobs in one reply to ListJobs; it keeps the reply far below the message limit.
MAX_PAGE_JOBS = 500
# Maximum number of jobs of one submission.
MAX_SUBMITTED_JOBS = 100
# Maximum number of files of one upload, so that the list of files fits into one message.
MAX_UPLOAD_FILES = 10_000
MAX_UPLOAD_PATH_BYTES = 255
# Initial metadata of a stream that may be silent at first. The metadata shows the client that the
# connection is up.
STREAM_OPEN = ("stream", "open")
_MAX_METADATA_BYTES = 8 << 10

_LIMITS = [
    # Also limits a compressed message after decompression.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
    # A killed peer is noticed at once. Only pings show a frozen peer: every 30 s, with 10 s to
    # reply.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_LIMITS,
    # gRPC sends no keepalive ping while its own bandwidth ping is unanswered, so the bandwidth ping
    # also needs a timeout.
    ("grpc.http2.ping_timeout_ms", 40_000),
    # Reconnect to a restarted server within a second; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the timeout of one connection attempt.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Connect directly to the given address. The proxy variables are meant for web traffic.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    # A fixed window limits the unread requests that a stream keeps in the server's memory. Without
    # a fixed window, gRPC raises the limit to several MiB, and a client that only sends fills it.
    ("grpc.http2.bdp_probe", 0),
    # Without bandwidth pings this is the timeout of the keepalive ping.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", 512 << 10),
    # Clients ping every 30 s; the default of five minutes would end a silent call's connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # With port reuse, two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    # The limit of one connection; the client delays further streams until other streams end.
    ("grpc.max_concurrent_streams", 1024),
    # Drop a connection without a handshake after 10 s; gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
]
# A separate generator, because other code draws from the global generator.
_jitter = random.Random()


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`: "localhost" or a loopback IP address.

    `host` has no brackets. All other names give False.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """Return the IP address of this machine on the network interface that leads to `host`.

    Sends nothing. Raises OSError if no interface leads to `host`.
    """
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


def backoff(failures: int, first: float, longest: float) -> float:
    """Return the seconds to wait before a new attempt after `failures` failures in a row (at least
    1).

    The pause is `first` seconds after the first failure. It doubles with each further failure, up
    to `longest` seconds, and is then multiplied by a random number from 0.5 to 1. The random number
    spreads the clients of a restarted server over time.
    """
    pause = min(longest, first * 2.0 ** min(failures - 1, 30))
    return pause * _jitter.uniform(0.5, 1.0)
