"""A Ray cluster does the work of a merge: paths travel to its processes, and tensors never do.

connection  where the cluster is, Ray itself, and what a process keeps from one task to the next
executor    the executor: items, the sources' files and the output's as tasks
"""

from covmerge.run.engine.cluster.connection import cluster_address, has_gpus
from covmerge.run.engine.cluster.executor import RayCluster

__all__ = ["RayCluster", "cluster_address", "has_gpus"]
