"""A Ray cluster does the work of a merge: paths travel to its processes, and tensors never do.

connection  where the cluster is, and Ray itself
kept        what a process of the cluster keeps from one task to the next
hashing     the sources' hashes as tasks, a file each
executor    the executor: items as tasks
"""

from covmerge.engine.cluster.connection import cluster_address
from covmerge.engine.cluster.executor import CLIENT_HOLDS, Cluster

__all__ = ["CLIENT_HOLDS", "Cluster", "cluster_address"]
