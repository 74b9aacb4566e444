"""Merging methods: one file per paper, each a short composition of the shared parts.

To add one: a file here with a kernel decorated by `@register(...)`, its import below, its tests.
"""

from covmerge.methods import ace, actmat, average, task_arithmetic
from covmerge.methods.registry import Method, registry

names = registry.names
get = registry.get

__all__ = ["Method", "ace", "actmat", "average", "get", "names", "registry", "task_arithmetic"]
