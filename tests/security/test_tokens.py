"""Token files, tokens of clients, and the duration of comparisons."""

from __future__ import annotations

import secrets
import socket
import statistics
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.cli.app import main
from protos.auth.access import MAX_TOKEN_CHARS, MIN_TOKEN_CHARS, Role, Tokens, read_tokens
from protos.errors import InvalidInput
from protos.rpc.channel import SERVER_TOKEN, open_channel
from tests.security.conftest import Secrets
from tests.security.processes import server
from tests.security.timing import times_in_turns

OLD, NEW = "old" + "a" * 40, "new" + "b" * 40


def write_tokens(path: Path, text: str, mode: int = 0o600) -> Path:
    path.touch(mode)
    path.chmod(mode)
    path.write_text(text)
    return path


def test_several_tokens_of_a_role_are_valid_at_once(tmp_path: Path) -> None:
    text = f"# team\n\nread {OLD}\n  READ\t{NEW}  \nadmin {'c' * 64}\n"
    tokens = read_tokens(write_tokens(tmp_path / "tokens", text))
    assert [tokens.role_of(token) for token in (OLD, NEW, "c" * 64)] == [
        Role.READ,
        Role.READ,
        Role.ADMIN,
    ]
    assert [tokens.role_of(token) for token in ("", "d" * 64, OLD[:-1], "\udcff")] == [None] * 4
    # Tokens are stored as digests: a dump of the object does not show them.
    assert OLD not in repr(vars(tokens))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666, 0o620])
def test_a_file_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidInput, match=f"mode {mode:o}.*chmod 600") as caught:
        read_tokens(write_tokens(tmp_path / "tokens", f"read {OLD}\n", mode))
    assert caught.value.field == "--token-file"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (OLD, "is not ROLE TOKEN"),
        (f"owner {OLD}", "one of read, submit, admin"),
        (f"read {OLD} {NEW}", "is not ROLE TOKEN"),
        (f"read {OLD[: MIN_TOKEN_CHARS - 1]}", "distill token"),
        (f"read {'a' * (MAX_TOKEN_CHARS + 1)}", "distill token"),
        (f"read {OLD}\u00e9", "distill token"),
        (f"read {NEW}", "repeats"),
    ],
)
def test_a_wrong_line_is_named_and_never_quoted(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word) as caught:
        read_tokens(write_tokens(tmp_path / "tokens", f"submit {NEW}\n{line}\n"))
    assert "tokens:2 " in str(caught.value)
    assert not any(
        token_part in str(caught.value) for token_part in (OLD[5:20], NEW[5:20], "aaaaaaaaaa")
    )


@pytest.mark.parametrize("text", ["", "\n", "# read, until Monday\n"])
def test_a_file_without_a_token_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    """For instance a truncated file: it must not disable the check of tokens."""
    with pytest.raises(InvalidInput, match="holds no token") as caught:
        read_tokens(write_tokens(tmp_path / "tokens", text))
    assert caught.value.field == "--token-file"


def test_tokens_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_tokens(None)
    monkeypatch.setenv("DISTILL_TOKENS", f"read {OLD}\nadmin {NEW}")
    assert read_tokens(None).role_of(NEW) is Role.ADMIN
    # If there is a token file, the environment variable is ignored.
    assert read_tokens(write_tokens(tmp_path / "tokens", f"read {OLD}")).role_of(NEW) is None
    monkeypatch.setenv("DISTILL_TOKENS", "read short")
    with pytest.raises(InvalidInput, match=r"\$DISTILL_TOKENS: line 1 "):
        read_tokens(None)


def test_distill_token_makes_lines_of_a_token_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in Role:
        assert main(["token", "--role", role.name.lower()]) == 0
    lines = capsys.readouterr().out
    tokens = read_tokens(write_tokens(tmp_path / "tokens", lines))
    for role, line in zip(Role, lines.splitlines(), strict=True):
        assert tokens.role_of(line.split()[1]) is role
    assert len({line.split()[1] for line in lines.splitlines()}) == len(Role)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "teacher:1", "http://gpu-node:1", "[::2]:1"])
def test_a_token_never_leaves_the_machine_in_the_clear(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_channel(address, token=SERVER_TOKEN).close()
    monkeypatch.setenv(SERVER_TOKEN, OLD)
    with pytest.raises(InvalidInput, match="unencrypted") as caught:
        open_channel(address, token=SERVER_TOKEN)
    assert OLD not in str(caught.value)
    for local_address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "https://teacher:1"):
        open_channel(local_address, token=SERVER_TOKEN).close()


def test_grpc_itself_keeps_the_token_here(tmp_path: Path) -> None:
    """gRPC's local credentials are a second check after the check of the address."""
    bearer = grpc.access_token_call_credentials(OLD)
    local = grpc.composite_channel_credentials(grpc.local_channel_credentials(), bearer)
    addresses = [address for nic in psutil.net_if_addrs().values() for address in nic]
    own_addresses = {
        address.address for address in addresses if address.family is socket.AF_INET
    } - {"127.0.0.1"}
    if not own_addresses:
        pytest.skip("this machine has no address but loopback")
    request = health_pb2.HealthCheckRequest()
    with server(tmp_path / "runs", "--host", "0.0.0.0", "--insecure") as program:
        with grpc.secure_channel(f"{own_addresses.pop()}:{program.port}", local) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with grpc.secure_channel(f"127.0.0.1:{program.port}", local) as channel:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)


def test_a_bad_token_of_a_client_is_told_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_TOKEN, "has a space " + OLD)
    with pytest.raises(InvalidInput, match=r"\$DISTILL_TOKEN"):
        open_channel("localhost:1", token=SERVER_TOKEN)


def test_the_time_of_a_comparison_tells_nothing() -> None:
    """10^4 tokens that are wrong in the first character, 10^4 in the last, taken in turns."""
    right = secrets.token_urlsafe(32)
    tokens = Tokens({secrets.token_urlsafe(32): Role.READ, right: Role.ADMIN})
    changed_character = {char: "A" if char != "A" else "B" for char in (right[0], right[-1])}
    wrong = (changed_character[right[0]] + right[1:], right[:-1] + changed_character[right[-1]])
    times = times_in_turns(tokens.role_of, wrong)
    medians = [statistics.median(nanoseconds) for nanoseconds in times]
    # Standard error of a median of n: 1.2533 sigma / sqrt(n); sigma from quartiles, which are
    # robust against pauses.
    spreads = [
        statistics.quantiles(nanoseconds)[2] - statistics.quantiles(nanoseconds)[0]
        for nanoseconds in times
    ]
    sigma = 1.2533 * sum((spread / 1.349) ** 2 / 10_000 for spread in spreads) ** 0.5
    delta = abs(medians[0] - medians[1])
    print(f"\nmedians {medians} ns, difference {delta} ns, 3 sigma {3 * sigma:.1f} ns")
    # 50 ns: the resolution of the clock.
    assert delta < max(3 * sigma, 50)


def test_a_comparison_looks_at_every_token(
    tokens: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hmac

    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or original(a, b))
    known_tokens = Tokens(
        {tokens.read: Role.READ, tokens.submit: Role.SUBMIT, tokens.admin: Role.ADMIN}
    )
    for token in (tokens.read, tokens.admin, "x" * 43):
        compared.clear()
        known_tokens.role_of(token)
        assert len(compared) == 3
        assert {len(digest) for digest in compared} == {32}
