"""Which route a layer takes, and what it costs: the one dispatch table.

| question                       | rule                             | why                           |
|--------------------------------|----------------------------------|-------------------------------|
| system of the closed form      | dual when T·d_out < d_in         | its side is T·d_out; primal,  |
|                                |                                  | only the ridge gives it rank  |
| R(RᵀR) of one root R (n, d_in) | (RRᵀ)R when 2n < d_in            | 4n²·d_in < 2n·d_in² FLOPs     |
| spectrum of F (d_out, d_in)    | float64: SVD; float32: float64   | the small eigenproblem is the |
|                                | eigenproblem of the smaller Gram | cheaper, and resolves σ to    |
|                                |                                  | 1e-8 of the largest           |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A float64 operation takes the time of two in float32, the unit in which costs are estimated.
FLOAT64 = 2.0


@dataclass(frozen=True)
class Cost:
    """Work of one layer: floating-point operations, and bytes beside its inputs and its result."""

    flops: float
    workspace: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.workspace + other.workspace)


def use_dual(d_out: int, d_in: int, count: int) -> bool:
    """Whether `count` roots `(d_out, d_in)` are cheaper in their row space than in d_in axes."""
    return count * d_out < d_in


def use_outer_gram(n: int, d_in: int) -> bool:
    """Whether R(RᵀR), R `(n, d_in)`, is cheaper as (RRᵀ)R."""
    return 2 * n < d_in


def use_svd(dtype: torch.dtype) -> bool:
    """Whether a spectrum is taken by SVD (float64) rather than through the smaller Gram."""
    return dtype == torch.float64


def normal_equations_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Cost of forming ΣR_tC_t and ΣC_t (see `covmerge.covariance.normal`)."""
    root = d_out * d_in * itemsize
    if use_dual(d_out, d_in, count):
        m = count * d_out
        return Cost(2.0 * m * m * d_in, (m * d_in + m * m + d_out * m) * itemsize + root)
    gram = d_in * d_in * itemsize
    products = 2.0 * d_out * d_in * d_in
    if use_outer_gram(d_out, d_in):
        products += 4.0 * d_out * d_out * d_in
        temporary = d_out * d_out * itemsize
    else:
        products *= 2
        temporary = gram
    return Cost(count * products, gram + temporary + 2 * root)


def solve_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Cost of a Cholesky solve of the system for d_out right-hand sides."""
    side = min(count * d_out, d_in) if use_dual(d_out, d_in, count) else d_in
    flops = side**3 / 3 + 2.0 * d_out * side * side
    if side < d_in:
        flops += 2.0 * d_out * side * d_in  # back from the row space
    return Cost(flops, (side * side + 2 * d_out * side) * itemsize)


def eigh_cost(side: int) -> Cost:
    """Cost of a full symmetric eigenproblem in float64: divide and conquer, LAPACK's workspace."""
    return Cost(FLOAT64 * 9.0 * side**3, 5 * side * side * 8)


def svd_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Cost of the k leading singular triplets (see `covmerge.linalg.spectral`)."""
    short, long = sorted((d_out, d_in))
    kept = k * (d_out + d_in) * itemsize
    if itemsize == torch.float64.itemsize:
        flops = FLOAT64 * (6.0 * short * short * long + 20.0 * short**3)
        return Cost(flops, (3 * short * long + 6 * short * short) * 8 + kept)
    products = FLOAT64 * 2.0 * short * long * (short + k)
    blocks = 2 * short * min(long, 1024) * 8
    return eigh_cost(short) + Cost(products, blocks + kept)


def joint_cost(d: int, columns: int, count: int, itemsize: int) -> Cost:
    """Cost of U and σ of `count` matrices `(d, columns)` side by side (see `covmerge.linalg.joint`)."""
    wide = count * columns
    if itemsize == torch.float64.itemsize:
        flops = FLOAT64 * (2.0 * d * d * wide + 20.0 * d**3)
        return Cost(flops, (2 * d * wide + 6 * d * d) * 8)
    gram = Cost(FLOAT64 * 2.0 * d * d * wide, d * columns * 8)
    return gram + eigh_cost(d)


def polar_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Cost of U diag(s) V with the polar factors of U `(d_out, k)` and V `(k, d_in)`."""
    left = svd_cost(d_out, k, min(d_out, k), itemsize)
    right = svd_cost(k, d_in, min(k, d_in), itemsize)
    products = 2.0 * k * (d_out * min(d_out, k) + d_in * min(d_in, k) + d_out * d_in)
    # The vectors, their stack, and its polar factor.
    held = 3 * k * (d_out + d_in) * itemsize
    return Cost(left.flops + right.flops + products, max(left.workspace, right.workspace) + held)
