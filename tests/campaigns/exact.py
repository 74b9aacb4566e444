"""The equation of the covariance methods in as many digits as it takes.

    W̄ = (Σ w_t Δ_t C_t)(Σ w_t C_t + P)⁻¹

    python -m tests.campaigns.exact --minutes 1 --seed 0

Where the system's condition number κ is beyond float64, reference implementation and kernel have the
same excuse, and agree by it or by chance. So tiny layers are solved by mpmath in 120
digits, with graded updates and data up to κ = 1e30, and the kernel is held to what a backward-stable
solution of the system has (Higham 2002, Theorem 9.3 and §7.1), C = ΔᵀΔ being formed in the same precision:

    ‖ΔW̄‖ ≤ 16 n u κ (‖W̄‖ + Σ ‖w_tΔ_tC_t‖ / ‖Σ w_tC_t + P‖),   κ = ‖Σ w_tC_t + P‖ ‖(Σ w_tC_t + P)⁻¹‖,

as long as 16 n u κ < 1; beyond, it must be finite. The methods are those of one system without a cut-off:
`regmean` with a ridge, and `ace` without its refinement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import mpmath
import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.errors import CovmergeError
from covmerge.methods import registry
from tests.methods.groups import group_of

METHODS: dict[str, dict[str, Any]] = {
    "regmean": {"off_diagonal": 1.0},
    "ace": {"normalize": False, "prior": False, "refine": False},
    "ace with its prior": {"normalize": False, "refine": False},
}
OUTCOMES = ("agrees", "beyond the dtype", "averaged", "refused", "failed")


def drawn(name: str, seed: int, number: int) -> tuple[LinearGroup, dict[str, Any]]:
    """A layer of up to 4 × 5 of up to three experts, whose system has a condition number of up to 1e30."""
    random = Random(f"{seed} {name} {number}")
    d_out, d_in, count = random.randint(2, 4), random.randint(1, 5), random.randint(1, 3)
    dtype = random.choice((torch.float32, torch.float64))
    generator = torch.Generator().manual_seed(random.getrandbits(31))

    def graded(rows: int, columns: int, least: float) -> Tensor:
        full = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        U, S, Vh = torch.linalg.svd(full, full_matrices=False)
        made = U @ torch.diag(torch.logspace(0, least, len(S), dtype=torch.float64)) @ Vh
        return made - 0.9 * made.mean(0)  # ACE averages what has rows that are nearly alike

    updates = [graded(d_out, d_in, random.uniform(-6, 0)).to(dtype) for _ in range(count)]
    weights = [random.choice((1.0, 0.5, 3.0)) for _ in range(count)]
    method, given = registry.get(name.split()[0]), dict(METHODS[name])
    group = group_of(method, updates, weights)
    if method.data == "gram":
        grades = random.uniform(-8, 0)
        inputs = [graded(8, d_in, grades).to(dtype) for _ in range(count)]
        pairs = zip(group.expert_statistics, inputs, strict=True)
        group = replace(group, expert_statistics=tuple(replace(m, value=x.T @ x) for m, x in pairs))
        given["ridge"] = 10.0 ** random.uniform(-30, -1)
    else:
        given["eps"] = 10.0 ** random.uniform(-30, -1)
    return group, given


def solved(name: str, group: LinearGroup, given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """W̄, κ and Σ ‖w_tΔ_tC_t‖ / ‖system‖ in 120 digits."""
    d_out, d_in = group.updates[0].shape
    deltas = [_exactly(update) for update in group.updates]
    weights = [mpmath.mpf(weight) for weight in group.weights]
    terms, system = [], mpmath.zeros(d_in)
    one_in, one_out = mpmath.ones(d_in, 1), mpmath.ones(d_out, 1)
    if name == "regmean":
        for delta, weight, measured in zip(deltas, weights, group.expert_statistics, strict=True):
            C = weight * _exactly(measured.value)
            terms.append(delta * C)
            system += C
        trace = sum(system[i, i] for i in range(d_in))
        system += mpmath.mpf(given["ridge"]) * trace / d_in * mpmath.eye(d_in)
    else:
        structural = mpmath.zeros(d_in)
        mean = sum(weights) / len(weights)
        for delta, weight in zip(deltas, weights, strict=True):
            centred = delta - one_out * (one_out.T * delta / d_out)
            C = weight / mean * centred.T * centred
            structural += C
            C += weight / mean * mpmath.mpf(given["eps"]) * mpmath.eye(d_in)
            terms.append(centred * C)
            system += C
        if name == "ace with its prior":
            system += one_in * (one_in.T * structural / d_in)
    inverse = mpmath.inverse(system)
    size = mpmath.mnorm(system, "f")
    kappa = size * mpmath.mnorm(inverse, "f")
    share = sum(mpmath.mnorm(term, "f") for term in terms) / size
    return sum(terms, mpmath.zeros(d_out, d_in)) * inverse, kappa, share


def look(name: str, seed: int, number: int) -> tuple[str, str]:
    """An outcome, and the distance in words."""
    group, given = drawn(name, seed, number)
    method = registry.get(name.split()[0])
    try:
        found = method(group, **method.resolve(given))
    except CovmergeError as error:
        return "refused", str(error)
    merged = found.delta
    if not torch.isfinite(merged).all():
        return "failed", "NaN or Inf"
    if found.stats.get("averaged"):  # rows that are nearly alike: another equation
        return "averaged", ""
    with mpmath.workdps(120):
        try:
            exact, kappa, share = solved(name, group, given)
        except ZeroDivisionError:
            return "beyond the dtype", "no inverse in 120 digits"
        u = torch.finfo(merged.dtype).eps / 2
        grows = 16 * max(merged.shape) * u * kappa
        off = mpmath.mnorm(_exactly(merged) - exact, "f")
        allowed = grows * (mpmath.mnorm(exact, "f") + share)
        said = f"off by {float(off):.3g}, allowed {float(allowed):.3g}, κ {float(kappa):.3g}"
    if grows >= 1:
        return "beyond the dtype", said
    return ("agrees" if off <= allowed else "failed"), said


def _exactly(tensor: Tensor) -> Any:
    return mpmath.matrix(tensor.double().tolist())


def run(seed: int, *, first: int, count: int, seconds: float) -> dict[str, Counter[str]]:
    """Solve layers of each method in turns; print what fails."""
    counts = {name: Counter[str]() for name in METHODS}
    until = time.monotonic() + seconds
    for number in range(first, first + count):
        for name, own in counts.items():
            if time.monotonic() > until:
                return counts
            outcome, said = look(name, seed, number)
            own[outcome] += 1
            if outcome == "failed":
                print(f"{name}: input {number}: {said}", flush=True)
    return counts


def table(counts: dict[str, Counter[str]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = [f"| method | layers | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for name, own in counts.items():
        lines.append(f"| {name} | {own.total()} | {' | '.join(str(own[o]) for o in OUTCOMES)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = run(asked.seed, first=asked.first, count=asked.count, seconds=60 * asked.minutes)
    print(table(counts))
    return 1 if any(own["failed"] for own in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
