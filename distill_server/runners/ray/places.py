"""Where the processes of an attempt are, and what tells each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where an actor is. `gpus`: as CUDA_VISIBLE_DEVICES names them; `port`: a free one."""

    node: str
    address: str
    gpus: tuple[str, ...]
    port: int


def rank_variables(places: Sequence[Place]) -> list[dict[str, str]]:
    """What tells each process of its place among the others, in order of `places`.

    Processes of a node see each other's GPUs, as torch's launcher has it: LOCAL_RANK is the index.
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
