"""Ports for programs that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from protos.rpc import ports
from protos.rpc.ports import free_ports


def outgoing_ports() -> range:
    first_port, last_port = map(
        int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    )
    return range(first_port, last_port + 1)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_ports_are_different_free_and_not_those_of_outgoing_connections(host: str) -> None:
    free = free_ports(200, host)
    assert len(set(free)) == 200
    assert not set(free) & set(outgoing_ports())
    for port in free[:20]:
        socket.create_server((host, port)).close()


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (chosen,) = free_ports(1)
    kernel = tmp_path / "ip_local_port_range"
    kernel.write_text(f"{chosen + 1}\t65535\n")
    monkeypatch.setattr(ports, "_RANGE_FILE", kernel)
    monkeypatch.setattr(ports, "_FIRST_PORT", chosen)
    assert free_ports(1) == [chosen]
    with socket.create_server(("127.0.0.1", chosen)):
        (other_port,) = free_ports(1)
        assert other_port != chosen


def test_without_other_ports_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = tmp_path / "ip_local_port_range"
    kernel.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_RANGE_FILE", kernel)
    assert len(set(free_ports(3))) == 3
