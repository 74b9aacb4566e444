"""CART, TSV-Merge, DC-Merge, ResMerge, Iso-C, Iso-CTS and FR-Merging."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.methods.golden_cases.common import (
    LINEAR,
    Case,
    density_of,
    group_of,
    merged,
    per_layer,
    says,
    updates_of,
)


def cart(scale: float, rank_ratio: float) -> Case:
    """The published code treats attention and MLP only; the rest is averaged."""
    given = {"scale": scale, "rank_ratio": rank_ratio}

    def run(variant: str) -> dict[str, Tensor]:
        averaged = per_layer("average").run(variant)
        return {**averaged, **per_layer("cart", names=LINEAR, **given).run(variant)}

    return Case(run, says("cart", given))


def free(**given: object) -> Case:
    """Biases are left out: the published ones are the first expert's."""
    case = per_layer("free", names=LINEAR, scale=1.0, **given)
    return replace(case, leaves_out=(".bias",))


def dc_merge(count: int, **given: object) -> Case:
    """The first experts. The published count is a share of r² entries, where the core has fewer, too."""
    density = {"density": 1e-3, **given}["density"]

    def run(variant: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        results = {}
        for name in LINEAR:
            updates = updates_of(variant, name, dtype)[:count]
            side = min(updates[0].shape)
            kept = max(1, int(density * side**2))
            own = density_of(kept, (side // count * count) ** 2)
            results[name] = merged("dc_merge", group_of(updates), **{**given, "density": own})
        return results

    return Case(run, says("dc_merge", given), partial(run, dtype=torch.float64))


def resmerge_of_two() -> Case:
    """The first two experts."""

    def run(variant: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        updates = {name: updates_of(variant, name, dtype)[:2] for name in LINEAR}
        return {name: merged("resmerge", group_of(own)) for name, own in updates.items()}

    return Case(run, "resmerge() of two", partial(run, dtype=torch.float64))


# Every direction, as published: one of 64 in heterog/c_proj lies at 2e-7 of the largest, where the
# default takes it for rounding. A flat spectrum gives it the weight of any other.
ALL = {"rank_rtol": 0.0}
CASES = {
    "cart_prior1.5_rank0.25": cart(1.5, 0.25),
    "cart_prior2.0_rank0.12": cart(2.0, 0.12),
    "tsvm": per_layer("tsv_m"),
    "actmatrepo_tsv": per_layer("tsv_m"),
    "tsvm_lossless": per_layer("tsv_m", lossless=True, **ALL),
    "dc_merge": per_layer("dc_merge", names=LINEAR),
    "dc_merge_top0.1": per_layer("dc_merge", names=LINEAR, density=0.1),
    "dc_merge_two_top0.1": dc_merge(2, density=0.1),
    "dc_merge_three": dc_merge(3),
    "lora_dc_merge": per_layer("dc_merge", lora=True, smoothing=1.0),
    "lora_dc_merge_avg_top0.1": per_layer("dc_merge", lora=True, smoothing=1.0, density=0.1),
    "lora_dc_merge_linear_top0.1": per_layer("dc_merge", lora=True, smoothing=5.0, density=0.1),
    "lora_dc_merge_linear1.5_top0.1": per_layer("dc_merge", lora=True, smoothing=1.5, density=0.1),
    "resmerge": per_layer("resmerge", names=LINEAR),
    "resmerge_two": resmerge_of_two(),
    "resmerge_k4_rho0.5": per_layer(
        "resmerge", names=LINEAR, head_rank=4, head_ratio=0.5, beta_min=0.5, beta_max=1.2
    ),
    "lora_resmerge": per_layer("resmerge", lora=True),
    "lora_resmerge_k2_rho1": per_layer(
        "resmerge", lora=True, head_rank=2, head_ratio=1.0, beta_min=0.2, beta_max=0.9
    ),
    "iso_c": per_layer("iso_c", **ALL),
    "actmatrepo_isoc": per_layer("iso_c", **ALL),
    "iso_cts_f0.5": per_layer("iso_cts", common_fraction=0.5, **ALL),
    "iso_cts_f0.8": per_layer("iso_cts", common_fraction=0.8, **ALL),
    "free_fr_filter0.7": free(),
    "free_fr_filter0.7_align": free(align=True),
}
