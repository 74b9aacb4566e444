"""TIES, DARE, DELLA, Consensus Task Arithmetic and EMR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from safetensors.torch import load_file
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.select import kth_magnitude
from covmerge.maths.methods.emr import rescalers
from covmerge.methods import registry
from tests.methods.golden_cases.common import (
    EXPERTS,
    FOLDER,
    NAMES,
    Case,
    density_of,
    group_of,
    merged,
    per_layer,
    says,
    updates_of,
)

ALMOST_ONE = 1 - 2**-24
Groups = dict[str, LinearGroup]


@dataclass(frozen=True)
class Fixed:
    """A stream that gives the numbers it was made of."""

    numbers: Tensor

    def uniform(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        assert self.numbers.shape == shape
        return self.numbers


@cache
def stored(file: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{file}.safetensors")


def masked_group(file: str, kind: str, variant: str, name: str) -> LinearGroup:
    """Updates with streams that repeat the published masks: 0 where the mask is true."""
    masks = [stored(file)[f"{variant}/{kind}/{t}/{name}"] for t in EXPERTS]
    streams = tuple(Fixed(torch.where(mask, 0.0, ALMOST_ONE)) for mask in masks)
    return group_of(updates_of(variant, name), streams=streams)


def ranked(method: str, groups: Groups, parameters: dict[str, object]) -> Groups:
    """The groups with the thresholds that the global pass of all of them finds."""
    registered = registry.get(method)
    given = registered.resolve(parameters)
    density = registered.ranked(given)
    vectors = [registered.global_pass.vectors(group, given) for group in groups.values()]
    whole = [torch.cat([v[t].flatten() for v in vectors]) for t in EXPERTS]
    rank = whole[0].numel() - int(density * whole[0].numel())
    thresholds = tuple(kth_magnitude(vector, rank) for vector in whole)
    return {
        name: LinearGroup(
            group.updates, group.weights, streams=group.streams, thresholds=thresholds
        )
        for name, group in groups.items()
    }


def over_the_model(
    method: str,
    group: Callable[[str, str], LinearGroup] = lambda v, name: group_of(updates_of(v, name)),
    **parameters: object,
) -> Case:
    """All tensors with one threshold per expert."""

    def run(variant: str) -> dict[str, Tensor]:
        groups = ranked(method, {name: group(variant, name) for name in NAMES}, parameters)
        return {name: merged(method, group, **parameters) for name, group in groups.items()}

    return Case(run, says(method, parameters))


def mergelm_density() -> float:
    """MergeLM's threshold is the ⌊0.8·N⌋-th smallest, which keeps one entry more than 0.2 does."""
    total = sum(updates_of("homog", name)[0].numel() for name in NAMES)
    return density_of(total - int(0.8 * total), total)


def per_tensor_ties(kept: Callable[[int], int], scale: float = 1.0) -> Case:
    """TIES with each tensor's own threshold and a count of its own; a 1-D tensor is one vector."""

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name in NAMES:
            group = group_of(updates_of(variant, name))
            total = group.updates[0].numel()
            density = density_of(kept(total), total)
            results[name] = merged("ties", group, trim="tensor", density=density, scale=scale)
        return results

    return Case(run, "ties(trim=tensor)")


def dare(file: str, method: str, **parameters: object) -> Case:
    """DARE with the published masks."""

    def group(variant: str, name: str) -> LinearGroup:
        return masked_group(file, "drop_mask", variant, name)

    if method == "dare_ties":
        return over_the_model(method, group, **parameters)
    return masked(method, group, **parameters)


def masked(method: str, group: Callable[[str, str], LinearGroup], **parameters: object) -> Case:
    """Each tensor by itself, with the published masks."""

    def run(variant: str) -> dict[str, Tensor]:
        return {name: merged(method, group(variant, name), **parameters) for name in NAMES}

    return Case(run, says(method, parameters))


def emr(variant: str) -> dict[str, Tensor]:
    """The unified vector, what each expert runs with, and the rescalers."""
    results = {name: registry.get("emr")(group_of(updates_of(variant, name))) for name in NAMES}
    factors = rescalers([result.diagnostics for result in results.values()])
    computed = {"rescalers": torch.tensor(factors)}
    for name, result in results.items():
        computed[f"unified/{name}"] = result.delta
        for t in EXPERTS:
            computed[f"recon/{t}/{name}"] = factors[t] * result.masks[t] * result.delta
    return computed


DELLA = "della_drop0.7_win0.2_lam1.1"

CASES = {
    "ties_k20_mean": over_the_model("ties", density=0.2),
    "ties_k20_sum": over_the_model("ties", density=0.2, merge="sum"),
    "ties_k50_mean": over_the_model("ties", density=0.5),
    "ties_mergelm_mask0.8_s1.0": over_the_model("ties", density=mergelm_density()),
    # Exactly round(0.2·N) largest; ours keeps one more than the count it is given.
    "ties_perlayer_k20": per_tensor_ties(lambda total: round(0.2 * total) - 1),
    # The threshold is the ⌊0.1·N⌋-th smallest.
    "ties_ace_repo_default": per_tensor_ties(lambda total: total - int(0.1 * total)),
    **{
        f"dare_ta_p{p}_s0.3": dare(f"dare_ta_p{p}_s0.3", "dare_task_arithmetic", drop=p, scale=0.3)
        for p in (0.5, 0.9)
    },
    **{
        f"dare_ties_p{p}_mask0.8_s1.0": dare(
            f"dare_ties_p{p}_mask0.8_s1.0", "dare_ties", drop=p, density=mergelm_density()
        )
        for p in (0.5, 0.9)
    },
    DELLA: masked(
        "della",
        lambda variant, name: masked_group(DELLA, "keep_mask", variant, name),
        density=0.3,
        window=0.2,
        scale=1.1,
    ),
    **{
        f"consensus_ta_lam{lam}_k{k}": per_layer("consensus", mask_lambda=lam, k=k, scale=1.0)
        for lam, k in ((0.2, 2), (0.4, 1), (0.4, 2))
    },
    "emr": Case(emr, "emr()"),
}
