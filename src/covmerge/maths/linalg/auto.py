"""The routes of a layer's computation: their costs, and the rule that chooses one.

Every question below is a function that returns a `Choice`: the possible routes, the cost of each, and
the route that is taken. Kernels ask for it where a shape decides, plans add up the costs, and
`covmerge explain` prints all of it.

| question           | routes                | taken                                                  |
|--------------------|-----------------------|--------------------------------------------------------|
| `system_choice`    | primal, dual          | the fewer FLOPs; dual only while T·d_out < d_in: beyond |
|                    |                       | that only the ridge gives its Gram matrix full rank     |
| `cube_choice`      | inner, outer          | the fewer FLOPs                                         |
| `symmetric_choice` | whole, strips         | strips on a CPU, unless the matrix is one strip         |
| `spectrum_choice`  | svd, gram             | float64: SVD; float32: the float64 eigenproblem of the  |
|                    |                       | smaller Gram matrix, cheaper, and exact to 1e-8 of σ₁   |
| `leading_choice`   | svd, gram, refined    | float32, where it is cheaper there: the float32         |
|                    |                       | eigenproblem, whose leading pairs are refined           |
| `polar_choice`     | svd, gram, products   | the cheaper of products and what spectra are found by,  |
|                    |                       | on that device; where products do not tell, the other   |
| `inverse_choice`   | cholesky32, cholesky64, | the first that is exact: the data decide (see `pinv`) |
|                    | eigen64               |                                                         |
| `cut_off_choice`   | eigen64, projector64  | the cheaper on that device; eigen64 where products do   |
|                    |                       | not tell (see `by_products`)                            |
| `factored_choice`  | dense, factored       | factored, where all experts are adapters                |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

# Costs are in units of float32 operations. A float64 operation takes the time of two on a CPU, and the
# declared costs of methods are those of a CPU. The table's GPUs are those of data centres, which do
# float64 at the rate of float32.
FLOAT64 = 2.0
_FLOAT64 = {"cpu": FLOAT64, "cuda": 1.0}
# Cost of a symmetric eigenproblem with eigenvectors, in products of its size and precision. LAPACK's
# takes the time of 5.5 on a CPU, and has the FLOPs of 4.5. On an H100 cuSOLVER's takes the time of 38,
# and 9.5 µs for each column, because columns follow one after the other: 2.1 ms for 256 columns, 8.0 for
# 768, 28 for 2048 and 126 for 4096, where a product takes 0.03, 0.04, 0.3 and 2.3 ms.
_LAPACK = 4.5
EIGENPROBLEM = {"cpu": _LAPACK, "cuda": 38.0}
# FLOPs that products could do on the device in the time of one column; and in the time in which an
# iteration by products launches its kernels one by one and waits for its Cholesky factors.
_COLUMN, _BEGUN = {"cuda": 5.6e8}, {"cuda": 2.4e11}
# Time of a column of a singular value decomposition on the device, in columns of an eigenproblem: 1.5-10.
_OF_SVD = 6.0
# Steps of a polar factor or a projector by products (see `covmerge.maths.linalg.by_products`).
STEPS = 22
# Elements of all updates that are multiplied together, and the least number of rows where rows are long: C
# is read once for each block.
DOTS_BLOCK, DOTS_ROWS = 2**18, 256
# Strips of a symmetric product: few enough that each is a large product, many enough to save.
_STRIPS, _LEAST_STRIP, _LARGEST_STRIP = 6, 128, 384
# Side of an eigenproblem below which the calls of a refinement outweigh what it saves.
_LEAST_REFINED = 256


@dataclass(frozen=True)
class Cost:
    """The work of one layer.

    Attributes:
        flops: floating-point operations.
        workspace: bytes beside the inputs and the result.
        eigen: the part of `flops` that is eigenproblems and singular values, which no device does at the
            rate of products.
    """

    flops: float
    workspace: int
    eigen: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.workspace + other.workspace,
            self.eigen + other.eigen,
        )

    def times(self, count: float) -> Cost:
        """Return the cost of doing this again and again, in the memory of once."""
        return Cost(count * self.flops, self.workspace, count * self.eigen)

    def then(self, *others: Cost) -> Cost:
        """Return the cost of one work after the other, in the memory of the largest.

        Example:
            >>> Cost(3.0, 10).then(Cost(1.0, 20)) + Cost(0.0, 5)
            Cost(flops=4.0, workspace=25, eigen=0.0)
        """
        most = max(self.workspace, *(other.workspace for other in others))
        return replace(sum(others, self), workspace=most)


@dataclass(frozen=True)
class Choice:
    """The routes for one question about a layer."""

    question: str  # the quantity to compute
    routes: Mapping[str, Cost]  # the cost of each route, by name
    taken: str  # the chosen route, or the one that is tried first where the data decide
    why: str  # the rule that chose it

    @property
    def cost(self) -> Cost:
        """Cost of the route that is taken."""
        return self.routes[self.taken]


def system_choice(d_out: int, d_in: int, count: int, itemsize: int) -> Choice:
    """Return the choice of coordinates for the closed form (see `covmerge.maths.covariance.normal`)."""
    routes = {
        name: sums_cost(name, d_out, d_in, count, itemsize)
        + solve_cost(name, d_out, d_in, count, itemsize)
        for name in ("primal", "dual")
    }
    small = count * d_out < d_in
    return Choice(
        "(ΣRC)(ΣC)⁻¹",
        routes,
        "dual" if small and routes["dual"].flops < routes["primal"].flops else "primal",
        "fewer FLOPs; dual only while T·d_out < d_in",
    )


def cube_choice(n: int, d_in: int, itemsize: int, device: str = "cpu") -> Choice:
    """Return the choice of order for the products RᵀR and R(RᵀR), R `(n, d_in)`; both are needed."""
    gram = symmetric_cost(n, d_in, device)
    routes = {
        "inner": Cost(gram + 2.0 * n * d_in * d_in, d_in * d_in * itemsize),
        "outer": Cost(gram + symmetric_cost(d_in, n, device) + 2.0 * n * n * d_in, n**2 * itemsize),
    }
    return Choice("RᵀR and R(RᵀR)", routes, _cheapest(routes), "fewer FLOPs")


def symmetric_choice(m: int, n: int, device: str = "cpu") -> Choice:
    """Return how RᵀR, R `(m, n)`, is computed (see `covmerge.maths.linalg.symmetric`)."""
    routes = {"whole": Cost(2.0 * m * n * n, 0), "strips": Cost(symmetric_cost(m, n, device), 0)}
    return Choice("RᵀR", routes, _cheapest(routes), "fewer FLOPs")


def spectrum_choice(d_out: int, d_in: int, k: int, itemsize: int, device: str = "cpu") -> Choice:
    """Return how the k leading singular triplets are computed (see `covmerge.maths.linalg.spectral`)."""
    short, long = sorted((d_out, d_in))
    triplets = k * (d_out + d_in) * itemsize
    float64 = _float64(device)
    products = float64 * (symmetric_cost(long, short, device) + 2.0 * short * long * k)
    blocks = 2 * short * min(long, 1024) * 8
    svd = (6.0 * short * short * long + 20.0 * short**3) * _beside_cpu(device)
    svd = float64 * (svd + _OF_SVD * _COLUMN.get(device, 0.0) * short)
    routes = {
        "svd": Cost(svd, (3 * short * long + 6 * short * short) * 8 + triplets, svd),
        "gram": eigh_cost(short, device) + Cost(products, blocks + triplets),
    }
    taken = "svd" if itemsize == torch.float64.itemsize else "gram"
    return Choice("k singular triplets", routes, taken, "float64: svd; float32: gram")


def leading_choice(d_out: int, d_in: int, k: int, itemsize: int, device: str = "cpu") -> Choice:
    """Return how the k leading singular triplets are computed where no other singular values are needed.

    The route is `refined` (see `covmerge.maths.linalg.refined`) if the spectrum allows it, and else that of
    `spectrum_choice`.
    """
    whole = spectrum_choice(d_out, d_in, k, itemsize, device)
    short = min(d_out, d_in)
    b = k + beside(k)
    gram = whole.routes["gram"]
    once = _float64(device) * (2.0 * short * short * (b + k) + 6.0 * short * b * b + 9.0 * b**3)
    # Two rounds of refinement; long thin products run at two thirds of the speed of large ones.
    eigen = _eigenproblem(short, device)
    pairs = eigen + 3.0 * (once + 4.0 * short * short * k)
    flops = gram.flops - eigh_cost(short, device).flops + pairs
    routes = {**whole.routes, "refined": Cost(flops, gram.workspace, eigen)}
    possible = whole.taken == "gram" and b < short and short >= _LEAST_REFINED
    taken = _cheapest({name: routes[name] for name in ("gram", "refined")})
    why = f"float64: svd; float32: the cheaper on {device}, gram where the spectrum wants it"
    return Choice("k leading triplets", routes, taken if possible else whole.taken, why)


def beside(k: int) -> int:
    """Return how many eigenpairs are refined beside the k wanted ones, so that the gap beyond is clear."""
    return k // 4 + 8


def polar_choice(d_out: int, d_in: int, itemsize: int, device: str = "cpu") -> Choice:
    """Return how a polar factor is computed (see `covmerge.maths.linalg.polar`)."""
    short, long = sorted((d_out, d_in))
    whole = spectrum_choice(d_out, d_in, short, itemsize, device)
    symmetric = symmetric_cost(long, short, device)
    flops = _float64(device) * (2.0 * symmetric + 2.0 * short * short * long)
    # Cholesky factors that bound the smallest eigenvalue, and one more for the root.
    flops += steps_cost(short, device) + _float64(device) * 5.0 * short**3 / 3
    held = (5 * short * short + 2 * short * min(long, 1024)) * 8 + short * long * itemsize
    routes = {whole.taken: whole.cost, "products": Cost(flops, held)}
    return Choice("UVᵀ", routes, _cheapest(routes), f"the cheaper on {device}, if it tells")


def inverse_choice(side: int, rows: int, device: str = "cpu") -> Choice:
    """Return how rows `(rows, side)` are divided by a semi-definite system (see `linalg.pinv`).

    Each Cholesky route factorises twice: the first factor proves that no eigenvalue is cut off.
    """
    cholesky = 2.0 * side**3 / 3 + 2.0 * rows * side * side
    held = (side * side + 2 * rows * side) * 8
    eigen = _float64(device) * 4.0 * rows * side * side
    routes = {
        "cholesky32": Cost(cholesky, held // 2),
        "cholesky64": Cost(_float64(device) * cholesky, held),
        "eigen64": eigh_cost(side, device) + Cost(eigen, 2 * rows * side * 8),
    }
    why = "the first that is exact: Cholesky where no eigenvalue is cut off"
    return Choice("B A†", routes, "cholesky32", why)


def cut_off_choice(side: int, rows: int, device: str = "cpu") -> Choice:
    """Return how rows `(rows, side)` are divided where eigenvalues are cut off (see `linalg.pinv`)."""
    # The check of the sign by its square; five Cholesky factors, four of which only bound eigenvalues.
    beside = symmetric_cost(side, side, device) + 5.0 * side**3 / 3 + 4.0 * rows * side * side
    flops = steps_cost(side, device) + _float64(device) * beside
    routes = {
        "eigen64": inverse_choice(side, rows, device).routes["eigen64"],
        "projector64": Cost(flops, (5 * side * side + 2 * rows * side) * 8),
    }
    why = f"the cheaper on {device}, if it tells"
    return Choice("B A†, cut off", routes, _cheapest(routes), why)


def steps_cost(side: int, device: str = "cpu") -> float:
    """Return the FLOPs of the iteration of `linalg.by_products` on a matrix `(side, side)` in float64."""
    step = symmetric_cost(side, side, device) + 2.0 * side**3
    return _float64(device) * STEPS * step + _BEGUN.get(device, 0.0)


def factored_choice(d_out: int, d_in: int, ranks: Sequence[int], itemsize: int) -> Choice:
    """Return how updates of adapters are written: dense or factored (see `maths.methods.factored`)."""
    total = sum(ranks)
    p, q = min(d_out, total + 1), min(d_in, total)
    dense = system_choice(d_out, d_in, len(ranks), itemsize).cost
    core = system_choice(p, q, len(ranks), 8).cost
    bases = 2.0 * (d_out * (total + 1) ** 2 + d_in * total**2) + 30.0 * total**3
    factors = (d_out + d_in) * total * 8
    routes = {
        "dense": dense + Cost(2.0 * d_out * d_in * total, len(ranks) * d_out * d_in * itemsize),
        "factored": Cost(FLOAT64 * (core.flops + bases), core.workspace + 2 * factors),
    }
    return Choice("updates of adapters", routes, "factored", "always, where all are adapters")


def routes(
    d_out: int,
    d_in: int,
    count: int,
    itemsize: int,
    rank: int | None = None,
    device: str = "cpu",
) -> list[Choice]:
    """Return the choices for a layer of this shape; with `rank`, those for adapters of that rank."""
    system = system_choice(d_out, d_in, count, itemsize)
    side = count * d_out if system.taken == "dual" else d_in
    found = [] if rank is None else [factored_choice(d_out, d_in, [rank] * count, itemsize)]
    if system.taken == "primal":
        found += [system]
        found += [cube_choice(d_out, d_in, itemsize, device)]
        found += [symmetric_choice(d_out, d_in, device)]
    else:
        found += [system, symmetric_choice(d_in, side, device)]
    inverse = inverse_choice(side, d_out, device), cut_off_choice(side, d_out, device)
    spectrum = spectrum_choice(d_out, d_in, min(d_out, d_in), itemsize, device)
    share = max(1, min(d_out, d_in) // count)
    leading = leading_choice(d_out, d_in, share, itemsize, device)
    return [*found, *inverse, spectrum, leading, polar_choice(d_out, d_in, itemsize, device)]


def triangle_block(n: int, device: str = "cpu") -> int:
    """Return the rows of a strip of a symmetric product `(n, n)`; all rows on other devices than a CPU."""
    if device != "cpu":
        return n
    return min(n, max(_LEAST_STRIP, min(_LARGEST_STRIP, n // _STRIPS)))


def symmetric_cost(m: int, n: int, device: str = "cpu") -> float:
    """Return the FLOPs of RᵀR by strips, R `(m, n)`."""
    return 1.0 * m * n * (n + triangle_block(n, device))


def sums_cost(route: str, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Return the cost of forming ΣR_tC_t and ΣC_t (see `covmerge.maths.covariance.normal`)."""
    root = d_out * d_in * itemsize
    if route == "dual":
        m = count * d_out
        return Cost(symmetric_cost(d_in, m), (m * d_in + m * m + d_out * m) * itemsize + root)
    cube = cube_choice(d_out, d_in, itemsize).cost
    gram = d_in * d_in * itemsize
    return Cost(count * cube.flops, gram + cube.workspace + 2 * root)


def solve_cost(route: str, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Return the cost of a Cholesky solve of the system for d_out right-hand sides."""
    side = count * d_out if route == "dual" else d_in
    flops = side**3 / 3 + 2.0 * d_out * side * side
    if route == "dual":
        flops += 2.0 * d_out * side * d_in  # from the row space to d_in axes
    return Cost(flops, 2 * d_out * side * itemsize)


def pinv_cost(d_out: int, d_in: int, count: int) -> Cost:
    """Return the cost of (ΣRC)(ΣC)† where eigenvalues are cut off: sums and eigenproblem in float64."""
    choice = system_choice(d_out, d_in, count, 8)
    side = count * d_out if choice.taken == "dual" else d_in
    sums = sums_cost(choice.taken, d_out, d_in, count, 8)
    eigen = inverse_choice(side, d_out).routes["eigen64"]
    return sums.times(FLOAT64) + eigen


def eigh_cost(side: int, device: str = "cpu") -> Cost:
    """Return the cost of a full symmetric eigenproblem in float64: divide and conquer, LAPACK's workspace.

    On a device that is slow at eigenproblems, the FLOPs are those of products that take the same time.
    """
    flops = _float64(device) * _eigenproblem(side, device)
    return Cost(flops, 5 * side * side * 8, flops)


def _float64(device: str) -> float:
    """Return the time of a float64 operation on the device, in float32 operations."""
    return _FLOAT64.get(device, FLOAT64)


def _eigenproblem(side: int, device: str) -> float:
    """Return the FLOPs of products that take the time of one eigenproblem, in the same precision."""
    return 9.0 * side**3 * _beside_cpu(device) + _COLUMN.get(device, 0.0) * side


def _beside_cpu(device: str) -> float:
    """Return how many times as many products a large eigenproblem costs on the device as on a CPU."""
    return EIGENPROBLEM.get(device, _LAPACK) / _LAPACK


def svd_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Return the cost of the k leading singular triplets (see `covmerge.maths.linalg.spectral`)."""
    return spectrum_choice(d_out, d_in, k, itemsize).cost


def leading_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Return the cost of the k leading singular triplets alone (see `linalg.spectral.leading_svd`)."""
    return leading_choice(d_out, d_in, k, itemsize).cost


def metric_cost(d_out: int, d_in: int, itemsize: int) -> Cost:
    """Return the cost of two spectra of ΔC^½, C `(d_in, d_in)` float64 (see `linalg.metric`).

    FLOPs are those for a C with a Cholesky factor, memory is that for a singular C.
    """
    matrix = d_out * d_in
    root = Cost(FLOAT64 * d_in**3 / 3, d_in * d_in * (8 + itemsize))
    if d_out <= d_in and itemsize != torch.float64.itemsize:
        products = 1.0 * matrix * d_in + FLOAT64 * symmetric_cost(d_in, d_out)
        spectrum = eigh_cost(d_out) + Cost(products, 2 * matrix * 8)
        return root + spectrum.times(2)
    spectrum = svd_cost(d_out, d_in, min(d_out, d_in), itemsize)
    spectrum += Cost(1.0 * matrix * d_in, matrix * itemsize)
    return root + spectrum.times(2).then(Cost(0.0, eigh_cost(d_in).workspace))


def dots_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Return the cost of all ⟨Δ_tC, Δ_u⟩ (see `covmerge.maths.linalg.metric`)."""
    flops = 1.0 * count * d_out * d_in * (d_in + 2 * count)
    rows = min(count * d_out, max(DOTS_BLOCK // d_in, DOTS_ROWS))
    return Cost(flops, 2 * (rows * d_in + d_in * d_in) * itemsize)


def joint_cost(d: int, columns: int, count: int, itemsize: int) -> Cost:
    """Return the cost of U and σ of `count` matrices `(d, columns)` side by side (see `linalg.joint`)."""
    wide = count * columns
    if itemsize == torch.float64.itemsize:
        eigen = FLOAT64 * 20.0 * d**3
        products = FLOAT64 * 2.0 * d * d * wide
        return Cost(products + eigen, (2 * d * wide + 6 * d * d) * 8, eigen)
    gram = Cost(FLOAT64 * symmetric_cost(wide, d), d * columns * 8)
    return gram + eigh_cost(d)


def polar_cost(d_out: int, d_in: int, k: int, itemsize: int, *, apart: int = 0) -> Cost:
    """Return the cost of U diag(s) V with the polar factors of U `(d_out, k)` and V `(k, d_in)`.

    `apart` columns of U are already orthonormal, and orthogonal to the others.
    """
    others = max(1, k - apart)
    left = svd_cost(d_out, others, min(d_out, others), itemsize)
    right = svd_cost(k, d_in, min(k, d_in), itemsize)
    products = 2.0 * others * d_out * min(d_out, others)
    products += 2.0 * k * d_in * (min(d_in, k) + d_out)
    # The vectors, the stack of them, and its polar factor, of which the solver has a copy.
    held = 4 * k * (d_out + d_in) * itemsize
    return left.then(right) + Cost(products, held)


def _cheapest(routes: Mapping[str, Cost]) -> str:
    return min(routes, key=lambda name: routes[name].flops)
