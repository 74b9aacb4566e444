"""How near covmerge must come to what mergekit made on another machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.mergekit.models import SETS
from tests.tolerance import assert_rounded_alike

# What these compute of an entry hangs on the experts' entries at its place, and on comparisons. Sums
# are of experts, in the recipe's order.
ELEMENTWISE = {
    *("passthrough", "task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties"),
    *("nearswap", "ram"),
}
LONGEST = 24 * 32  # entries of the largest tensor of models.py: no sum has more terms


def is_elementwise(recipe: Mapping[str, Any]) -> bool:
    """Whether no operation is a sum over a tensor, so that all machines make the same bits."""
    return recipe["merge_method"] in ELEMENTWISE and '"rescale": true' not in json.dumps(recipe)


def arithmetic_of(recipe: Mapping[str, Any]) -> torch.dtype:
    """The coarsest dtype that a model of the recipe is rounded to."""
    text = json.dumps(recipe)
    stored = [dtype for name, (_, *own) in SETS.items() if f"./{name}/" in text for dtype in own]
    said = [recipe["dtype"]] if recipe.get("dtype") else stored or ["float32"]
    return max((getattr(torch, name) for name in said), key=lambda dtype: torch.finfo(dtype).eps)


def assert_agrees(found: Tensor, wanted: Tensor, recipe: Mapping[str, Any]) -> None:
    """Compare bit for bit what has the same bits on every machine, and all else to rounding."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if is_elementwise(recipe):
        worst = (found.double() - wanted.double()).abs().max()
        assert torch.equal(found, wanted), f"off by {worst:.2g}"
    else:
        assert_rounded_alike(found, wanted, arithmetic_of(recipe), terms=LONGEST)
