"""A Ray cluster does the work of a merge: paths travel to its processes, and tensors never do.

connection  where the cluster is, and Ray itself
worker_cache  what a process of the cluster keeps from one task to the next
pieces      pieces of work as tasks, some on their way at a time
hashing     the sources' hashes, a file a piece
reading     the finished output, a file a piece
executor    the executor: items as tasks
"""

from covmerge.run.engine.cluster.connection import cluster_address, has_gpus
from covmerge.run.engine.cluster.executor import CLIENT_HOLDS, Cluster

__all__ = ["CLIENT_HOLDS", "Cluster", "cluster_address", "has_gpus"]
