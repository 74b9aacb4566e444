"""A Ray cluster does the work of a merge: paths travel to its processes, and tensors never do.

connection  where the cluster is, Ray itself, and what a process keeps from one task to the next
executor    the executor: items, the sources' files and the output's as tasks
"""
