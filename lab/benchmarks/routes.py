"""Is the route that the dispatch table chooses the faster one?

    python -m benchmarks.routes [--device cuda] [--rounds 2] [--out FILE.json]

Every question of `covmerge explain` on a range of shapes: all routes are run, interleaved, and the
least time of each is kept, none of a route that found no answer. `regret` is the time of the chosen
route over the fastest one's. Routes
that the data decide between (`inverse_choice`) are timed on a system where all of them are exact.

`rates` is what the table's constants rest on: milliseconds of a product, of a Cholesky factor, of an
eigenproblem and of a polar factor, of square matrices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import clock, machine, usable
from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.covariance import normal
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.linalg import auto, spectral
from covmerge.maths.linalg.cholesky import all_above
from covmerge.maths.linalg.lapack import cholesky, eigh, svd
from covmerge.maths.linalg.pinv import pinv_by_projector, pinv_right, solve_full_rank
from covmerge.maths.linalg.polar import polar_by_products
from covmerge.maths.linalg.spectral import RankRule, leading_directions, truncated_svd
from covmerge.maths.linalg.symmetric import gram
from covmerge.maths.methods.closed_form import solve_ridge
from covmerge.maths.methods.factored import merge_factors
from covmerge.methods import registry

RESULTS = Path(__file__).parent / "results"
Routes = Mapping[str, Callable[[], object]]
SIDES = (256, 768, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = usable(arguments.device)
    out = arguments.out or RESULTS / ("routes.json" if device == "cpu" else f"routes-{device}.json")
    found = rates(device, arguments.rounds)
    for row in found:
        print(row, flush=True)
    rows = []
    for shape, choice, routes in questions(device):
        seconds = timed(routes, arguments.rounds, device)
        fastest = min(seconds, key=seconds.__getitem__)
        row = {
            "question": choice.question,
            "shape": shape,
            "taken": choice.taken,
            "fastest": fastest,
            # None where the route that is taken could not tell.
            "regret": round(seconds[choice.taken] / seconds[fastest], 2)
            if seconds[choice.taken] < inf
            else None,
            "seconds": {name: round(value, 5) for name, value in seconds.items() if value < inf},
            "flops": {name: choice.routes[name].flops for name in seconds},
        }
        rows.append(row)
        print(
            {key: row[key] for key in ("question", "shape", "taken", "fastest", "regret")},
            flush=True,
        )
    agreed = sum(row["taken"] == row["fastest"] for row in rows)
    result = {
        "command": "python -m benchmarks.routes"
        + ("" if device == "cpu" else f" --device {device}"),
        "machine": machine(device),
        "the choice was the fastest": f"{agreed} of {len(rows)}",
        "largest regret": max(row["regret"] or 0.0 for row in rows),
        "rates": found,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def rates(device: str, rounds: int) -> list[dict[str, object]]:
    """Milliseconds of what the table reckons in products of the same size and precision."""
    rows: list[dict[str, object]] = []
    for side in SIDES:
        root = torch.randn(2 * side, side, generator=torch.Generator().manual_seed(0))
        work: dict[str, Callable[[], object]] = {}
        for dtype in ("float32", "float64"):
            system = gram(root.to(device, getattr(torch, dtype)))
            work[f"product, {dtype}"] = lambda a=system: a @ a
            work[f"cholesky, {dtype}"] = lambda a=system: cholesky(a)
            work[f"eigenproblem, {dtype}"] = lambda a=system: eigh(a)
        square = root[:side].to(device)
        work["polar factor by an eigenproblem"] = lambda a=square: leading_directions(
            a, len(a), rtol=1e-6
        )
        work["polar factor by products"] = lambda a=square: _found(
            polar_by_products(a, RankRule(1e-6))
        )
        seconds = timed(work, rounds, device)
        found = {name: round(1e3 * value, 3) for name, value in seconds.items() if value < inf}
        rows.append({"side": side, "milliseconds": found})
    return rows


def questions(device: str) -> Iterator[tuple[list[int], auto.Choice, Routes]]:
    """Shapes with the choice that is made for them, and all of its routes, ready to run."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for count, d_out, d_in in ((2, 128, 1024), (3, 512, 2048), (4, 384, 1536), (8, 768, 768)):
        covariances = [Covariance(noise(d_out, d_in)) for _ in range(count)]
        yield (
            [count, d_out, d_in],
            auto.system_choice(d_out, d_in, count, 4),
            {
                "primal": lambda c=covariances: _solved(normal._primal(c)),
                "dual": lambda c=covariances: _solved(normal._dual(c)),
            },
        )
    for n, d_in in ((256, 1024), (768, 3072), (640, 1024), (768, 768), (3072, 768)):
        root = noise(n, d_in)
        yield (
            [n, d_in],
            auto.cube_choice(n, d_in, 4, device),
            {
                "inner": lambda r=root: r @ gram(r),
                "outer": lambda r=root: (gram(r), gram(r.mT) @ r),
            },
        )
    for m, n in ((256, 96), (768, 768), (3072, 768), (768, 3072)):
        rows = noise(m, n)
        routes: dict[str, Callable[[], object]] = {"whole": lambda r=rows: r.mT @ r}
        routes["strips"] = lambda r=rows: gram(r)
        yield [m, n], auto.symmetric_choice(m, n, device), routes
    for d_out, d_in, k in ((768, 768, 96), (384, 1536, 384), (2304, 768, 96), (768, 3072, 768)):
        matrix = noise(d_out, d_in)
        yield (
            [d_out, d_in, k],
            auto.spectrum_choice(d_out, d_in, k, 4, device),
            {
                # As exact as the other: in float64.
                "svd": lambda a=matrix: svd(a.double()),
                "gram": lambda a=matrix, k=k: truncated_svd(a, k, RankRule(1e-6)),
            },
        )
    for d_out, d_in, k in ((768, 768, 96), (384, 1536, 48), (2304, 768, 19), (768, 768, 256)):
        matrix = noise(d_out, d_in)
        yield (
            [d_out, d_in, k],
            auto.leading_choice(d_out, d_in, k, 4, device),
            {
                "gram": lambda a=matrix, k=k: truncated_svd(a, k, RankRule(1e-6)),
                "refined": lambda a=matrix, k=k: _refined(a, k),
            },
        )
    for side, count in ((384, 1536), (768, 768), (2048, 768)):
        root = noise(4 * side, side)
        system, right = gram(root), noise(count, side)
        exact = system.double(), right.double()
        yield (
            [side, count],
            auto.inverse_choice(side, count, device),
            {
                "cholesky32": lambda a=system, b=right: solve_full_rank(a, b, RankRule(1e-6)),
                "cholesky64": lambda ab=exact: solve_full_rank(*ab, RankRule(1e-6)),
                "eigen64": lambda a=system, b=right: pinv_right(a, b, RankRule(1e-6)),
            },
        )
    for d_out, d_in in ((384, 384), (768, 768), (768, 3072)):
        matrix = noise(d_out, d_in)
        yield (
            [d_out, d_in],
            auto.polar_choice(d_out, d_in, 4, device),
            {
                "gram": lambda a=matrix: leading_directions(a, min(a.shape), rtol=1e-6),
                "products": lambda a=matrix: _found(polar_by_products(a, RankRule(1e-6))),
            },
        )
    for side, count in ((384, 1536), (768, 768)):
        # Of rank side/2, which the cut-off ends.
        system, right = gram(noise(side // 2, side)).double(), noise(count, side).double()
        yield (
            [side, count],
            auto.cut_off_choice(side, count, device),
            {
                "eigen64": lambda a=system, b=right: pinv_right(a, b, RankRule(1e-6)),
                "projector64": lambda a=system, b=right: _found(
                    pinv_by_projector(a, b, RankRule(1e-6))
                ),
            },
        )
    ace = registry.get("ace")
    for width, rank, count in ((768, 16, 8), (2048, 16, 4)):
        factors = [LowRank(noise(width, rank), noise(rank, width)) for _ in range(count)]
        weights = [1.0] * count
        yield (
            [width, rank, count],
            auto.factored_choice(width, width, [rank] * count, 4),
            {
                "dense": lambda f=factors, w=weights: ace(
                    LinearGroup(tuple(u.dense() for u in f), tuple(w)), **ace.resolve({})
                ),
                "factored": lambda f=factors, w=weights: merge_factors(ace, f, w, ace.resolve({})),
            },
        )


def _solved(equations: normal.NormalEquations) -> Tensor:
    return solve_ridge(replace(equations, ridge=1e-2))[0]


def _refined(matrix: Tensor, k: int) -> object:
    """By refinement whatever the shape."""
    gram = spectral.float64_gram(spectral.wide_of(matrix))
    found = spectral._refined(matrix, gram, k, RankRule(1e-6))
    assert found is not None
    return found


class _NoAnswerError(Exception):
    """Products could not tell."""


def _found(answer: object) -> object:
    """What products gave, who may have none."""
    if answer is None:
        raise _NoAnswerError
    return answer


def _checked(equations: normal.NormalEquations) -> Tensor:
    assert all_above(equations.gram, 1e-12)
    return solve_ridge(equations)[0]


def timed(routes: Routes, rounds: int, device: str) -> dict[str, float]:
    least = dict.fromkeys(routes, inf)
    for _ in range(rounds + 1):  # the first starts threads and fills caches
        for name, run in routes.items():
            start = clock(device)
            try:
                run()
            except _NoAnswerError:
                continue
            least[name] = min(least[name], clock(device) - start)
    return least


if __name__ == "__main__":
    main()
