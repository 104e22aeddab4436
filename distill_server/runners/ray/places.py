"""The places of an attempt's processes on the cluster, missing resources, and variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ActorPlace:
    """The place of one actor: node id, IP address, GPUs and a free TCP port on that node.

    `gpus` are names as in CUDA_VISIBLE_DEVICES.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    port: int


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the resources that processes without a place wait for, as a text.

    They wait for a larger node or for free resources. `bundles` are the CPUs and GPUs of each
    process, `nodes` the CPUs and GPUs of each live node.
    """
    counts = Counter(
        tuple((name, amount) for name, amount in bundle.items() if amount) for bundle in bundles
    )
    for resources in counts:
        if not any(all(node.get(name, 0) >= n for name, n in resources) for node in nodes):
            return f"no node has {_format_resources(resources)}"
    unplaced = [
        f"{count} x ({_format_resources(resources)})" for resources, count in counts.items()
    ]
    return f"no room for {' and '.join(unplaced)}"


def _format_resources(resources: Sequence[tuple[str, float]]) -> str:
    return " and ".join(
        f"{amount:g} {name}{'s' if amount != 1 else ''}" for name, amount in resources
    )


def rank_variables(places: Sequence[ActorPlace]) -> list[dict[str, str]]:
    """Return the environment variables of each rank (RANK, WORLD_SIZE, MASTER_ADDR and so on).

    `places` is in the order of ranks. As with torchrun, all processes of a node see all GPUs of the
    node's processes, and LOCAL_RANK is the index of a process among the processes of its node.
    """
    variables = []
    for rank, place in enumerate(places):
        node_places = [peer for peer in places if peer.node == place.node]
        variables_of_rank = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for peer in node_places for gpu in peer.gpus)
        }
        if len(places) > 1:
            earlier_places = [peer for peer in places[:rank] if peer.node == place.node]
            variables_of_rank |= {"RANK": str(rank), "WORLD_SIZE": str(len(places))}
            variables_of_rank |= {
                "LOCAL_RANK": str(len(earlier_places)),
                "LOCAL_WORLD_SIZE": str(len(node_places)),
            }
            variables_of_rank |= {
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(places[0].port),
            }
        variables.append(variables_of_rank)
    return variables
