"""What mergekit is run on, and the same in covmerge's words; neither is imported here.

`tests/methods/make_mergekit.py` runs mergekit over it and keeps inputs and outputs in
tests/golden/mergekit.safetensors; `test_mergekit.py` runs covmerge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SHAPES = {
    "h.10.fc.weight": (16, 24),
    "h.2.fc.weight": (24, 16),  # updates of a few magnitudes, so that many are equal
    "embed.weight": (30, 8),  # the second expert did not change it
    "norm.weight": (33,),
    "one": (1,),
    "conv": (3, 4, 5),
    "far": (2, 40),  # models that have nothing in common
    "opposite": (8, 8),  # the second expert went the other way
}
SEED = 42
DTYPES = (torch.float32, torch.bfloat16)


def models(count: int = 4) -> list[dict[str, Tensor]]:
    """The base and its experts."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], size: float) -> Tensor:
        return size * torch.randn(shape, generator=generator)

    base = {name: draw(shape, 0.5) for name, shape in SHAPES.items()}
    experts = [
        {name: own + draw(own.shape, 0.02 * (t + 1)) for name, own in base.items()}
        for t in range(count - 1)
    ]
    for expert in experts:
        start = base["h.2.fc.weight"]
        expert["h.2.fc.weight"] = start + ((expert["h.2.fc.weight"] - start) * 32).round() / 32
        expert["far"] = draw(SHAPES["far"], 0.5)
    experts[1]["embed.weight"] = base["embed.weight"].clone()
    experts[1]["opposite"] = 2 * base["opposite"] - experts[0]["opposite"]
    return [base, *experts]


@dataclass(frozen=True, eq=False)
class Case:
    """One merge.

    Attributes:
        theirs: mergekit's method.
        parameters: mergekit's; a list has a value for each expert.
        ours: covmerge's method; "": `generalized_task_arithmetic` with the settings of `theirs`.
        given: covmerge's parameters.
        experts: how many are merged.
        base: whether mergekit is given a base.
        without: tensors that mergekit cannot merge this way.
    """

    theirs: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    experts: int = 3
    base: bool = True
    without: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The tensors, in the order in which mergekit comes to them."""
        return sorted(set(SHAPES) - set(self.without))

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.parameters.items())
        return f"{self.theirs} of {self.experts}" + (f" ({said})" if said else "")


W = [0.2, 0.5, 0.3]
_NO_ROWS = ("one",)  # a rank in a row of one is 0/0


def delta(theirs: str, parameters: Mapping[str, Any], **more: Any) -> Case:
    """A case of the delta family; `lambda` is `scale`."""
    given = {("scale" if name == "lambda" else name): v for name, v in parameters.items()}
    return Case(theirs, parameters, given=given, **more)


CASES = (
    delta("task_arithmetic", {"weight": [0.4, 0.4, 0.4]}),
    delta("task_arithmetic", {"weight": [0.2, 0.5, -0.3], "lambda": 0.7, "normalize": True}),
    delta("ties", {"weight": W, "density": [0.5, 0.5, 0.5]}),
    delta("ties", {"weight": [1.0, 1.0, 1.0], "density": [0.6, 0.01, 1.0], "lambda": 0.9}),
    delta("ties", {"weight": W, "density": [0.3, 0.3, 0.3], "rescale": True, "normalize": False}),
    delta("breadcrumbs", {"weight": W, "density": [0.5, 0.7, 0.9], "gamma": [0.1, 0.01, 0.05]}),
    delta("breadcrumbs_ties", {"weight": W, "density": [0.9, 0.8, 0.5], "gamma": [0.01] * 3}),
    delta("dare_linear", {"weight": W, "density": [0.53, 0.5, 0.1]}),
    delta("dare_ties", {"weight": W, "density": [0.53, 1.0, 0.4]}),
    delta("dare_ties", {"weight": W, "density": [0.5, 0.5, 0.5], "rescale": False}),
    delta("della", {"weight": W, "density": [0.5, 0.6, 0.7]}, without=_NO_ROWS),
    delta(
        "della_linear",
        {"weight": W, "density": [0.5, 0.0, 1.0], "epsilon": [0.1, 0.1, 0.1]},
        without=_NO_ROWS,
    ),
    Case("linear", {"weight": W}, "linear", {"weight": W}, base=False),
    Case(
        *("linear", {"weight": [0.7, 0.6, 0.3], "normalize": False}),
        *("linear", {"weight": [0.7, 0.6, 0.3], "normalize": False}),
        base=False,
    ),
    Case("slerp", {"t": 0.3}, "slerp", {"t": 0.3}, experts=1),
    Case("nuslerp", {"weight": [0.3, 0.5]}, "nuslerp", {"weight": [0.3, 0.5]}, 2, base=False),
    Case(
        *("nuslerp", {"weight": [0.3, 0.5]}, "nuslerp"),
        *({"weight": [0.3, 0.5], "around": "base"}, 2),
    ),
    Case(
        *("nuslerp", {"weight": [0.3, 0.5], "nuslerp_flatten": False}, "nuslerp"),
        *({"weight": [0.3, 0.5], "by": "rows"}, 2),
        base=False,
    ),
    Case(
        "nuslerp",
        {"weight": [0.3, 0.5], "nuslerp_flatten": False, "nuslerp_row_wise": True},
        *("nuslerp", {"weight": [0.3, 0.5], "by": "columns"}, 2),
        base=False,
    ),
    Case("multislerp", {"weight": W}, "multislerp", {"weight": W}, base=False),
    Case("multislerp", {"weight": W}, "multislerp", {"weight": W, "around": "base"}),
    Case("model_stock", {}, "model_stock"),
    Case("model_stock", {"filter_wise": True}, "model_stock", {"filter_wise": True}),
    Case("sce", {}, "sce"),
    Case("sce", {"select_topk": 0.3}, "sce", {"select_topk": 0.3}),
    Case("karcher", {}, "karcher", base=False),
    Case("karcher", {"max_iter": 3}, "karcher", {"max_iter": 3, "base_place": 0}),
    Case("passthrough", {}, "passthrough", experts=1, base=False),
    Case("passthrough", {"scale": [0.3]}, "passthrough", {"scale": 0.3}, 1, base=False),
    Case("nearswap", {"t": 0.01}, "nearswap", {"t": 0.01}, experts=1),
    Case("arcee_fusion", {}, "arcee_fusion", experts=1),
    Case("ram", {"epsilon": 0.01}, "ram", {"epsilon": 0.01}),
    Case("ramplus_tl", {"epsilon": 0.01}, "ram", {"epsilon": 0.01, "boost": 0.1}),
)
ORDERED = ("ties", "breadcrumbs", "breadcrumbs_ties")
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")


def key(case: Case, dtype: torch.dtype) -> str:
    """Name of a case's output in the file."""
    return f"{CASES.index(case):02d} {case}: {str(dtype).removeprefix('torch.')}"


def stable_key(case: Case, dtype: torch.dtype) -> str:
    """Name of what mergekit makes of it with a stable sort."""
    return f"{key(case, dtype)}, sorted stably"
