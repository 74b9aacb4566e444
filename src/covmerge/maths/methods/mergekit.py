"""mergekit's method names as settings of covmerge's methods, and its places in torch's random stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IN_ORDER = "in_order"  # value of `drawn`: the plan counts the numbers, tensor after tensor

# mergekit 0.1.5's methods of the delta family, as settings of `generalized_task_arithmetic`.
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
    """Return the common name of a method: mergekit's name if the settings are those of mergekit's method.

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
    """What decides how many random numbers are drawn for one tensor."""

    sparsify: str  # the rule by which the tensor is merged
    densities: Sequence[float]  # the density of each expert that has the tensor, in order
    entries: int  # the tensor's number of entries

    def numbers(self) -> list[int]:
        """Return how many numbers are drawn for each expert."""
        wanted = {"bernoulli": -1.0, "ranked": 0.0}  # the density above which numbers are drawn
        least = wanted.get(self.sparsify, 1.0)
        return [self.entries if least < density < 1 else 0 for density in self.densities]


def places(tensors: Mapping[str, Drawn]) -> dict[str, list[int]]:
    """Return the place where each expert's numbers begin, tensor by tensor: the parameter `drawn`.

    mergekit draws from one stream, tensor by tensor in the lexicographic order of their names, and within
    a tensor expert by expert, without the base.

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
