"""A merged model held against its sources: `covmerge verify --deep`.

sources    base and experts as the merge had them
choice     which tensors are computed again, and which of them by a reference implementation
compute    the computation, and how far the stored tensors are from it
"""

from covmerge.run.recompute.compute import recompute

__all__ = ["recompute"]
