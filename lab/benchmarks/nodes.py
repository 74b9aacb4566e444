"""A Ray cluster on this machine: a head that does nothing itself, and nodes of a core each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STORE = 80 * 2**20  # bytes of Ray's own memory for objects, of which tasks hardly have any


@contextmanager
def nodes_of_ray(count: int) -> Iterator[str]:
    """Start the cluster, and yield its address."""
    from ray.cluster_utils import Cluster

    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    nodes_have = {
        "RAY_worker_niceness": "0",  # else its workers wait for whatever runs beside them
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),  # what tasks import
    }
    os.environ.update(nodes_have)
    node = {"num_cpus": 1, "object_store_memory": _STORE}
    head = {**node, "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
