"""Averaging, Task Arithmetic, ACTMat and ACE."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.methods.golden_cases.common import Case, group_of, merged, per_layer, updates_of

FLOAT64 = torch.finfo(torch.float64).eps


def ace(eps: str, *, double: bool, lora: bool) -> Case:
    dtype = torch.float64 if double else torch.float32
    given = {"eps": float(eps)}

    def ill_posed(variant: str, name: str, published: Tensor) -> None:
        # k of the refinement lies beyond the signal's rank, where the published code lifts arbitrary
        # directions. Without covmerge's cap on k the spectrum is the published one, though the
        # directions are not; with it, nothing leaves the rows that the updates span.
        updates = updates_of(variant, name, dtype, lora=lora)
        uncapped = merged("ace", group_of(updates), **given, rank_rtol=0.0).double()
        spectrum = torch.linalg.svdvals(published)
        assert (torch.linalg.svdvals(uncapped) - spectrum).norm() <= 5e-3 * spectrum.norm()
        if lora:
            capped = merged("ace", group_of(updates), **given).double()
            rows = torch.linalg.svd(torch.cat(updates).double(), full_matrices=False)[2][:16]
            assert (capped - capped @ rows.T @ rows).norm() <= 1e-4 * capped.norm()

    return replace(per_layer("ace", dtype=dtype, lora=lora, **given), ill_posed=ill_posed)


def actmat_fp64() -> Case:
    """The cut-off of the published code in float64, d_in · eps(float64)."""

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name, averaged in per_layer("average", dtype=torch.float64).run(variant).items():
            group = group_of(updates_of(variant, name, torch.float64))
            matrix = averaged.dim() == 2
            rtol = averaged.shape[-1] * FLOAT64
            results[name] = merged("actmat", group, rtol=rtol) if matrix else averaged
        return results

    return Case(run, "actmat(rtol=d_in · eps(float64))")


CASES = {
    "average": per_layer("average"),
    # Its residual is averaged before it is truncated, so it is zero: the plain average.
    "cart_ace_repo": per_layer("average"),
    **{
        f"task_arithmetic_s{scale}": per_layer("task_arithmetic", scale=scale)
        for scale in (0.3, 0.4, 1.0)
    },
    **{
        f"{prefix}ace_eps{eps}{suffix}": ace(eps, double=bool(suffix), lora=bool(prefix))
        for prefix, suite in (
            ("", ("1e-05", "0.0002", "0.01", "0.04")),
            ("lora_", ("1e-05", "0.01")),
        )
        for eps in suite
        for suffix in ("", "_fp64")
    },
    "actmat": per_layer("actmat"),
    "actmat_fp64_rtol32": per_layer("actmat", dtype=torch.float64),
    "actmat_fp64": actmat_fp64(),
    "lora_actmat": per_layer("actmat", lora=True),
    "lora_actmat_fp64": per_layer("actmat", dtype=torch.float64, lora=True, rtol=1e-9),
}
