"""What mergekit's names of methods are here, and where its random numbers are in their one stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IN_ORDER = "in_order"  # of `drawn`: the plan counts, tensor after tensor

# mergekit 0.1.5's delta family, as settings of `generalized_task_arithmetic`.
_CONSENSUS = {"consensus": True}
_KEPT_LENGTH = {"rescale": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "task_arithmetic": {},
    "ties": {"sparsify": "magnitude", "normalize": True, **_CONSENSUS},
    "dare_linear": {"sparsify": "bernoulli", **_KEPT_LENGTH},
    "dare_ties": {"sparsify": "bernoulli", **_KEPT_LENGTH, **_CONSENSUS},
    "della_linear": {"sparsify": "ranked", **_KEPT_LENGTH},
    "della": {"sparsify": "ranked", "normalize": True, **_KEPT_LENGTH, **_CONSENSUS},
    "breadcrumbs": {"sparsify": "band"},
    "breadcrumbs_ties": {"sparsify": "band", **_CONSENSUS},
}


DELTA = "generalized_task_arithmetic"


def called(method: str, parameters: Mapping[str, Any]) -> str:
    """Return what people call a method: mergekit's name where its settings are those of one.

    Example:
        >>> called("generalized_task_arithmetic", {"sparsify": "magnitude", "consensus": True})
        "mergekit's ties"
        >>> called("ties", {})
        'ties'
    """
    if method != DELTA:
        return method
    wanted = _kind(parameters)
    return next((f"mergekit's {n}" for n, s in SETTINGS.items() if _kind(s) == wanted), method)


def _kind(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    return settings.get("sparsify", "none"), settings.get("consensus", False)


@dataclass(frozen=True)
class Drawn:
    """What random numbers are drawn for, of one tensor.

    Attributes:
        sparsify: as the tensor is merged.
        densities: of each expert that has it, in order.
        entries: how many it has.
    """

    sparsify: str
    densities: Sequence[float]
    entries: int

    def numbers(self) -> list[int]:
        """How many numbers are drawn for each expert."""
        wanted = {"bernoulli": -1.0, "ranked": 0.0}  # the density above which there are any
        least = wanted.get(self.sparsify, 1.0)
        return [self.entries if least < density < 1 else 0 for density in self.densities]


def places(tensors: Mapping[str, Drawn]) -> dict[str, list[int]]:
    """Return where each expert's numbers begin, tensor by tensor: the parameter `drawn`.

    mergekit draws from one stream for one tensor after the other, in the lexicographic order of their
    names, and for one expert after the other, the base aside.

    Example:
        >>> half = Drawn("bernoulli", [0.5, 1.0, 0.5], entries=10)
        >>> places({"h.2": half, "h.10": half})
        {'h.10': [0, 10, 10], 'h.2': [20, 30, 30]}
    """
    found: dict[str, list[int]] = {}
    place = 0
    for name in sorted(tensors):
        found[name] = []
        for count in tensors[name].numbers():
            found[name].append(place)
            place += count
    return found
