"""The places of an attempt's processes on the cluster, what they wait for, and their variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place of one actor: node id, IP address, GPUs and a free TCP port on that node.

    `gpus` are names as in CUDA_VISIBLE_DEVICES.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    port: int


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> str:
    """Tell what processes that have no place wait for: a node, or room on the nodes.

    `bundles` have the CPUs and GPUs of each process, and `nodes` those of each living node.
    """
    counts = Counter(
        tuple((name, amount) for name, amount in bundle.items() if amount) for bundle in bundles
    )
    for wanted in counts:
        if not any(all(node.get(name, 0) >= n for name, n in wanted) for node in nodes):
            return f"no node has {_words(wanted)}"
    wishes = [f"{count} x ({_words(wanted)})" for wanted, count in counts.items()]
    return f"no room for {' and '.join(wishes)}"


def _words(wanted: Sequence[tuple[str, float]]) -> str:
    return " and ".join(f"{n:g} {name}{'s' if n != 1 else ''}" for name, n in wanted)


def rank_variables(places: Sequence[Place]) -> list[dict[str, str]]:
    """Return the environment variables of each rank (RANK, WORLD_SIZE, MASTER_ADDR and so on).

    `places` is in the order of ranks. As with torchrun, all processes of a node see all GPUs of the
    node's processes, and LOCAL_RANK is the index of a process among them.
    """
    variables = []
    for rank, place in enumerate(places):
        beside = [other for other in places if other.node == place.node]
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpu for one in beside for gpu in one.gpus)}
        if len(places) > 1:
            before = [other for other in places[:rank] if other.node == place.node]
            seen |= {"RANK": str(rank), "WORLD_SIZE": str(len(places))}
            seen |= {"LOCAL_RANK": str(len(before)), "LOCAL_WORLD_SIZE": str(len(beside))}
            seen |= {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(places[0].port)}
        variables.append(seen)
    return variables
