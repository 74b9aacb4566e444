"""A Ray cluster does the work of a merge: paths travel to its processes, and tensors never do."""
