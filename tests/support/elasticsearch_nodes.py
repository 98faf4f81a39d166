"""A cluster of several Elasticsearch nodes, each a local server with a state folder of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.elasticsearch import Elasticsearch
from deploy.local.service import HOST, Place, free_port
from deploy.local.stack import SERVERS, Stack
from tests.support.servers_state import servers_state


class Node(Elasticsearch):
    def __init__(self, name: str, transports: Mapping[str, int]) -> None:
        """transports: the port of each node for the others."""
        self._node, self._transports = name, transports

    def more_settings(self, place: Place) -> dict[str, object]:
        return {
            "node.name": self._node,
            "transport.port": self._transports[self._node],
            "discovery.type": "multi-node",
            "discovery.seed_hosts": [f"{HOST}:{port}" for port in self._transports.values()],
            "cluster.initial_master_nodes": list(self._transports),
            "cluster.fault_detection.leader_check.interval": "500ms",
            "cluster.fault_detection.follower_check.interval": "500ms",
        }


@dataclass(frozen=True, slots=True)
class Nodes:
    stacks: Mapping[str, Stack]
    """By the node's name."""

    @property
    def urls(self) -> Sequence[str]:
        return [stack.endpoints()["elasticsearch"]["url"] for stack in self.stacks.values()]

    def kill(self, name: str) -> None:
        self.stacks[name].kill("elasticsearch")

    def start(self, name: str) -> None:
        """Start a node again on its data, and wait until it answers."""
        self.stacks[name].start("elasticsearch")


@contextmanager
def cluster(folder: Path, count: int = 3) -> Iterator[Nodes]:
    """Nodes that have elected a master; all stop at the end."""
    transports: dict[str, int] = {}
    for number in range(count):
        transports[f"node-{number}"] = free_port(frozenset(transports.values()))
    with servers_state(folder) as state:
        stacks = {
            name: Stack(state / name, die_with_parent=True, servers=SERVERS | {"elasticsearch": Node(name, transports)})
            for name in transports
        }
        try:
            with ThreadPoolExecutor(count) as pool:  # none is ready before a majority is
                list(pool.map(lambda stack: stack.up(services=("elasticsearch",)), stacks.values()))
            yield Nodes(stacks)
        finally:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(Stack.down, stacks.values()))
