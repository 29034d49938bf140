"""A Ray cluster whose nodes are groups of processes of this machine, and what befalls them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest

from tests.replicas.conftest import Deployment, deployed, environment

psutil = pytest.importorskip("psutil")  # which Ray brings


class Nodes:
    """A head without room for a replica, since the ingress and Ray's own services live there, and
    nodes with room for one each. A node is named by the process that started its others."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(True, head_node_args=head, shutdown_at_exit=False)
        self._nodes: dict[int, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def names(self) -> set[int]:
        return {*self._nodes}

    def add(self) -> int:
        """A node comes."""
        node = self._cluster.add_node(num_cpus=1)
        name = int(node.all_processes["raylet"][0].process.pid)
        self._nodes[name] = node
        return name

    def signal(self, name: int, number: int) -> None:
        """All processes of a node get a signal at the same time."""
        root = psutil.Process(name)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self, name: int) -> None:
        """A node loses power."""
        self.signal(name, signal.SIGKILL)
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        for name in self.names:
            with suppress(psutil.NoSuchProcess):
                self.signal(name, signal.SIGCONT)
        self._cluster.shutdown()


def node_of(replica: dict[str, Any]) -> int:
    """The node of what `/v1/replicas` tells of a replica."""
    return int(psutil.Process(replica["pid"]).ppid())


@contextmanager
def alive(count: int) -> Iterator[Nodes]:
    """A cluster of `count` nodes beside its head."""
    with patch.dict(os.environ, environment()):
        nodes = Nodes()
        try:
            for _ in range(count):
                nodes.add()
            yield nodes
        finally:
            nodes.close()


@contextmanager
def cluster(count: int, *flags: str) -> Iterator[tuple[Nodes, Deployment]]:
    """A server with a replica on each of `count` nodes."""
    flags = ("--replicas", f"{count}", *flags)
    with alive(count) as nodes, deployed(*flags, RAY_ADDRESS=nodes.address) as (found, process):
        yield nodes, found
        process.send_signal(signal.SIGTERM)
        process.wait(60)
