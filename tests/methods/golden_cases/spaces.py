"""KnOTS, Core Space and Compress-then-Merge, on the factors of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.maths.linalg.select import kth_magnitude, threshold_rank
from covmerge.maths.methods.factored import merge_factors, ranked_factors
from covmerge.methods import registry
from tests.methods.golden_cases.common import EXPERTS, LINEAR, Case, inputs, says

WEIGHTS = (1.0,) * len(EXPERTS)


def factors_of(variant: str, name: str) -> list[LowRank]:
    """B_t and A_t of one tensor."""
    return [
        LowRank(
            inputs()[f"{variant}/lora_B/{t}/{name}"].double(),
            inputs()[f"{variant}/lora_A/{t}/{name}"].double(),
        )
        for t in EXPERTS
    ]


def adapters(method: str, **parameters: object) -> Case:
    """All tensors by their factors; with one threshold per expert where the method wants that."""
    registered = registry.get(method)
    given = registered.resolve(parameters)
    density = registered.ranked(given)

    def run(variant: str) -> dict[str, Tensor]:
        updates = {name: factors_of(variant, name) for name in LINEAR}
        thresholds = None
        if density is not None:
            found = [ranked_factors(registered, u, WEIGHTS, given) for u in updates.values()]
            whole = [torch.cat([v[t].flatten() for v in found]) for t in EXPERTS]
            thresholds = [kth_magnitude(v, threshold_rank(density, len(v))) for v in whole]
        return {
            name: merge_factors(registered, own, WEIGHTS, given, thresholds).delta.dense()
            for name, own in updates.items()
        }

    return Case(run, says(method, parameters))


def in_v(inner: str, **parameters: object) -> Case:
    """KnOTS as in Core Space's code: V_tᵀ, layer by layer."""
    return adapters("knots", inner=inner, space="v", trim="tensor", **parameters)


def in_cores(inner: str, *, isotropize: bool = False, **parameters: object) -> Case:
    return adapters("core_space", inner=inner, isotropize=isotropize, **parameters)


CASES = {
    "knots_ties_top20_s1.0": adapters("knots"),
    "knots_ties_top100_s1.0": adapters("knots", density=1.0),
    "knots_tv_sum_s1.0": adapters("knots", inner="task_arithmetic"),
    "knotsspace_ties": in_v("ties"),
    "knotsspace_tsv": in_v("tsv_m"),
    "knotsspace_cart": in_v("cart", rank_ratio=0.25),
    "corespace_ties": in_cores("ties"),
    "corespace_tsv": in_cores("tsv_m"),
    "corespace_tsv_iso": in_cores("tsv_m", isotropize=True),
    "corespace_sum_iso": in_cores("task_arithmetic", isotropize=True),
    "corespace_cart": in_cores("cart", rank_ratio=0.25),
    "ctm_ties_r8": adapters("ctm", core_rank=8),
    "ctm_ties_r4_b0.25": adapters("ctm", core_rank=4, strength=0.75, density=0.25),
    "ctm_mean_r3": adapters("ctm", core_rank=3, inner="average"),
    "ctm_sum_iso_r6": adapters("ctm", core_rank=6, inner="iso_c"),
    "ctm_tsv_r8": adapters("ctm", core_rank=8, inner="tsv_m"),
    "ctm_cart_r8_b0.5": adapters(
        "ctm", core_rank=8, strength=0.5, inner="cart", rank_ratio=0.25, scale=2.0
    ),
}
