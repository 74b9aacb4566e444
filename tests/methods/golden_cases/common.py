"""The fixed inputs of the goldens, and the usual ways to merge them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.random import Stream
from covmerge.methods import registry

FOLDER = Path(__file__).parent.parent.parent / "golden"
TOLERANCE: Mapping[str, float | None] = json.loads((FOLDER / "tolerance.json").read_text())
LINEAR = (
    "blocks.0.attn.out_proj.weight",
    "blocks.0.mlp.c_fc.weight",
    "blocks.0.mlp.c_proj.weight",
)
NAMES = ("blocks.0.attn.out_proj.bias", *LINEAR, "token_embedding.weight")
EXPERTS = range(4)

# variant ("homog" or "heterog") -> merged updates by tensor name. The test adds the base to them
# where the published output is a weight.
Run = Callable[[str], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """How covmerge computes what a golden file holds.

    Attributes:
        run: computes it.
        says: method and parameters, for the table.
        exact: computes it in float64.
        leaves_out: endings of names that covmerge treats otherwise on purpose.
        ill_posed: checks what is left to check of a tensor that the tolerances call ill-posed:
            `(variant, name, published)`.
    """

    run: Run
    says: str
    exact: Run | None = None
    leaves_out: tuple[str, ...] = ()
    ill_posed: Callable[[str, str, Tensor], None] | None = None


@cache
def inputs() -> Mapping[str, Tensor]:
    """Everything in inputs.safetensors; the keys are in the README of the golden data."""
    return load_file(FOLDER / "inputs.safetensors")


def updates_of(
    variant: str, name: str, dtype: torch.dtype = torch.float32, *, lora: bool = False
) -> tuple[Tensor, ...]:
    """Δ_t of one tensor, or B_t A_t."""
    if lora:
        return tuple(
            inputs()[f"{variant}/lora_B/{t}/{name}"].to(dtype)
            @ inputs()[f"{variant}/lora_A/{t}/{name}"].to(dtype)
            for t in EXPERTS
        )
    return tuple(inputs()[f"{variant}/delta/{t}/{name}"].to(dtype) for t in EXPERTS)


def group_of(updates: tuple[Tensor, ...], **given: object) -> LinearGroup:
    """The experts of one tensor with weight 1 each."""
    streams = tuple(Stream(f"expert{t}") for t in range(len(updates)))
    return LinearGroup(updates, (1.0,) * len(updates), **{"streams": streams, **given})


def merged(method: str, group: LinearGroup, **parameters: object) -> Tensor:
    """The merged update of one tensor."""
    registered = registry.get(method)
    return registered(group, **registered.resolve(parameters)).delta


def per_layer(
    method: str,
    *,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    names: tuple[str, ...] = NAMES,
    **parameters: object,
) -> Case:
    """Each tensor by itself; where the method merges matrices, the others are averaged."""

    def run(variant: str, dtype: torch.dtype = dtype) -> dict[str, Tensor]:
        results = {}
        for name in LINEAR if lora else names:
            group = group_of(updates_of(variant, name, dtype, lora=lora))
            if group.updates[0].dim() == 2 or registry.get(method).takes_any_shape:
                results[name] = merged(method, group, **parameters)
            else:
                results[name] = merged("average", group)
        return results

    return Case(run, says(method, parameters), partial(run, dtype=torch.float64))


def density_of(kept: int, total: int) -> float:
    """A density at which ⌊density · total⌋ is `kept`, whatever the rounding of the product."""
    return (kept + 0.5) / total


def says(method: str, parameters: Mapping[str, object]) -> str:
    """Method and parameters as one writes them."""
    given = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f"{method}({given})" if given else method
