"""The signature of `merge` for mypy 2.4, which lacks `extra_items` and would refuse methods' parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from covmerge.run.result import MergedFolder, MergedTensors
from covmerge.run.sources import Source

Experts = Mapping[str, Source] | Sequence[Source]


@overload
def merge(  # pyright: ignore[reportOverlappingOverload]
    base: Source,
    experts: Experts,
    method: str | Callable[..., Any] = "",
    out: None = None,
    **options: Any,
) -> MergedTensors: ...
@overload
def merge(
    base: Source,
    experts: Experts,
    method: str | Callable[..., Any] = "",
    out: str | Path = ...,
    **options: Any,
) -> MergedFolder: ...
def merge(*_: Any, **__: Any) -> Any:
    """Exist for mypy only; nothing calls this."""
