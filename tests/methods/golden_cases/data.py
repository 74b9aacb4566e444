"""WUDI, and the methods that use data: RegMean, LOT, SSR, ESM, Fisher."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from covmerge.base.types import Measured
from covmerge.maths.methods.factored import merge_factors
from covmerge.methods import registry
from tests.methods.golden_cases.common import (
    EXPERTS,
    LINEAR,
    NAMES,
    Case,
    group_of,
    inputs,
    merged,
    per_layer,
    says,
    updates_of,
)
from tests.methods.golden_cases.spaces import factors_of


def with_data(kind: str, method: str, names: tuple[str, ...], **parameters: object) -> Case:
    """Tensors with a statistic of `kind` by `method`; `names` without one are averaged."""

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name in names:
            updates = updates_of(variant, name)
            if f"{variant}/{kind}/0/{name}" in inputs():
                group = group_of(updates, expert_statistics=measured_of(kind, variant, name))
                results[name] = merged(method, group, **parameters)
            else:
                results[name] = merged("average", group_of(updates))
        return results

    return Case(run, says(method, parameters))


def measured_of(kind: str, variant: str, name: str) -> tuple[Measured, ...]:
    """What 256 rows of data said of one tensor."""
    return tuple(
        Measured(inputs()[f"{variant}/{kind}/{t}/{name}"], 256, total(kind, variant, t))
        for t in EXPERTS
    )


def routed(ridge: float, tokens: tuple[int, ...]) -> Case:
    """SSR on adapters and so many rows of each expert; weights and ridge are those of its code."""
    method = registry.get("ssr")

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name in LINEAR:
            rows = [inputs()[f"{variant}/X/{t}/{name}"][:n].double() for t, n in enumerate(tokens)]
            data = [Measured(x.T @ x / len(x), len(x), float((x.T @ x).norm())) for x in rows]
            own = factors_of(variant, name)[: len(tokens)]
            z = torch.cat(rows) @ torch.cat([each.right for each in own]).T
            given = method.resolve({"ridge": ridge / float(z.square().mean())})
            results[name] = merge_factors(method, own, tokens, given, measured=data).delta.dense()
        return results

    return Case(run, says("ssr", {"ridge": f"{ridge}, absolute", "tokens": tokens}))


def essential(experts: int = 4, rows: int = 256, **parameters: object) -> Case:
    """ESM in float64 on so many rows of the first experts; the constant factor n/(n − 1) cancels."""

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name in LINEAR:
            seen = [inputs()[f"{variant}/X/{t}/{name}"][:rows].double() for t in range(experts)]
            data = tuple(Measured(x.T @ x / rows, rows, float((x.T @ x).norm())) for x in seen)
            group = group_of(
                updates_of(variant, name, torch.float64)[:experts], expert_statistics=data
            )
            results[name] = merged("esm", group, energy_rtol=0.0, **parameters)
        return results

    return Case(run, says("esm", {"experts": experts, "rows": rows, **parameters}))


@cache
def total(kind: str, variant: str, t: int) -> float:
    values = [v for key, v in inputs().items() if key.startswith(f"{variant}/{kind}/{t}/")]
    return float(torch.cat([value.double().flatten() for value in values]).norm())


CASES = {
    "lora_ssr": routed(1e-4, (256,) * 4),
    "lora_ssr_two_ridge1e-2": routed(1e-2, (256,) * 2),
    "lora_ssr_few_tokens": routed(1e-4, (2, 5, 3, 4)),
    "esm_fp64": essential(),
    "esm_two_fp64": essential(2),
    "esm_roberta_fp64": essential(power=0.0, scale=1.0),
    "esm_roberta_few_rows_fp64": essential(rows=24, power=0.0, scale=1.0),
    "wudi_300": per_layer("wudi", names=LINEAR, solver="adam"),
    "aswudi": per_layer("aswudi", names=LINEAR),
    "aswudi_mean": per_layer("aswudi", names=LINEAR, start="mean"),
    # The published code takes eigenvalues that are rounding for directions, too.
    "swudi": per_layer("swudi", names=LINEAR, rtol=0.0, time=300.0),
    "swudi_r0.85_mean": per_layer(
        "swudi", names=LINEAR, rtol=0.0, time=300.0, rank_ratio=0.85, start="mean"
    ),
    **{
        f"regmean_a{a}": with_data("gram", "regmean", NAMES, off_diagonal=float(a))
        for a in ("0.1", "0.9", "1.0")
    },
    "regmean_actmat_d": with_data("gram", "lot", LINEAR),
    "fisher_bloomberg": with_data(
        "fisher", "fisher", NAMES, floor=1e-10, floor_how="add", normalize=False
    ),
    "fisher_mmatena": with_data("fisher", "fisher", NAMES, floor_on="first"),
    "fisher_mmatena_nofavor": with_data("fisher", "fisher", NAMES),
    "fisher_modelnorm_1e-6": with_data("fisher", "fisher", NAMES, floor_how="add"),
}
