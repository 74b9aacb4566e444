"""Which route a layer takes, and what it costs: the one dispatch table.

Every question below is a function that returns a `Choice`: the routes there are, the cost of each,
and the one that is taken. Kernels ask where a shape decides, plans add costs up, and `covmerge
explain` prints all of it.

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
from dataclasses import dataclass

import torch

# A float64 operation takes the time of two in float32, the unit in which costs are estimated, on a CPU, of
# which the declared costs of methods are. GPUs for data centres, of which alone the table is meant, do as
# many in float64 as in float32.
FLOAT64 = 2.0
_FLOAT64 = {"cpu": FLOAT64, "cuda": 1.0}
# What a symmetric eigenproblem costs, in products of its size and precision, eigenvectors included.
# LAPACK's takes 5.5 by the clock on a CPU, and has the FLOPs of 4.5. On an H100 cuSOLVER's takes as long as
# 38, and 9.5 µs for each column, since these follow one after the other: 2.1 ms of 256 columns, 8.0 of
# 768, 28 of 2048 and 126 of 4096, where a product takes 0.03, 0.04, 0.3 and 2.3.
_LAPACK = 4.5
EIGENPROBLEM = {"cpu": _LAPACK, "cuda": 38.0}
# What products could do there in a column's time; and while an iteration by products begins its kernels,
# one after the other, and waits for what Cholesky factors say.
_COLUMN, _BEGUN = {"cuda": 5.6e8}, {"cuda": 2.4e11}
# Columns of an eigenproblem whose time one of a singular value decomposition takes there: 1.5 to 10.
_OF_SVD = 6.0
# Steps of a polar factor or a projector by products (see `covmerge.maths.linalg.by_products`).
STEPS = 22
# Elements of all updates that are multiplied together, or so many rows where these are long: C is read
# once for each.
DOTS_BLOCK, DOTS_ROWS = 2**18, 256
# Strips of a symmetric product: few enough that each is a large product, many enough to save.
_STRIPS, _LEAST_STRIP, _LARGEST_STRIP = 6, 128, 384
# Side of an eigenproblem below which the calls of a refinement outweigh what it saves.
_LEAST_REFINED = 256


@dataclass(frozen=True)
class Cost:
    """Work of one layer.

    Attributes:
        flops: floating-point operations.
        workspace: bytes beside its inputs and its result.
        eigen: of `flops`, those of eigenproblems and singular values, which no device does at the rate of
            products.
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


@dataclass(frozen=True)
class Choice:
    """The routes that answer one question on a layer.

    Attributes:
        question: what is to be computed.
        routes: name -> cost.
        taken: the route that is taken, or tried first where the data decide.
        why: the rule.
    """

    question: str
    routes: Mapping[str, Cost]
    taken: str
    why: str

    @property
    def cost(self) -> Cost:
        """Cost of the route that is taken."""
        return self.routes[self.taken]


def system_choice(d_out: int, d_in: int, count: int, itemsize: int) -> Choice:
    """The coordinates of the closed form's system (see `covmerge.maths.covariance.normal`)."""
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
    """The order of products in RᵀR and R(RᵀR), R `(n, d_in)`; both are wanted."""
    gram = symmetric_cost(n, d_in, device)
    routes = {
        "inner": Cost(gram + 2.0 * n * d_in * d_in, d_in * d_in * itemsize),
        "outer": Cost(gram + symmetric_cost(d_in, n, device) + 2.0 * n * n * d_in, n**2 * itemsize),
    }
    return Choice("RᵀR and R(RᵀR)", routes, _cheapest(routes), "fewer FLOPs")


def symmetric_choice(m: int, n: int, device: str = "cpu") -> Choice:
    """How RᵀR, R `(m, n)`, is multiplied (see `covmerge.maths.linalg.symmetric`)."""
    routes = {"whole": Cost(2.0 * m * n * n, 0), "strips": Cost(symmetric_cost(m, n, device), 0)}
    return Choice("RᵀR", routes, _cheapest(routes), "fewer FLOPs")


def spectrum_choice(d_out: int, d_in: int, k: int, itemsize: int, device: str = "cpu") -> Choice:
    """How the k leading singular triplets are found (see `covmerge.maths.linalg.spectral`)."""
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
    """How the k leading singular triplets are found where no other values are wanted.

    By `refined` (see `covmerge.maths.linalg.refined`), where the spectrum lets it; else as all values are.
    """
    whole = spectrum_choice(d_out, d_in, k, itemsize, device)
    short = min(d_out, d_in)
    b = k + beside(k)
    gram = whole.routes["gram"]
    once = _float64(device) * (2.0 * short * short * (b + k) + 6.0 * short * b * b + 9.0 * b**3)
    # Two rounds of it, and long thin products run at two thirds of the speed of large ones.
    eigen = _eigenproblem(short, device)
    pairs = eigen + 3.0 * (once + 4.0 * short * short * k)
    flops = gram.flops - eigh_cost(short, device).flops + pairs
    routes = {**whole.routes, "refined": Cost(flops, gram.workspace, eigen)}
    possible = whole.taken == "gram" and b < short and short >= _LEAST_REFINED
    taken = _cheapest({name: routes[name] for name in ("gram", "refined")})
    why = f"float64: svd; float32: the cheaper on {device}, gram where the spectrum wants it"
    return Choice("k leading triplets", routes, taken if possible else whole.taken, why)


def beside(k: int) -> int:
    """How many eigenpairs are refined beside the k that are wanted: the gap beyond them must be clear."""
    return k // 4 + 8


def polar_choice(d_out: int, d_in: int, itemsize: int, device: str = "cpu") -> Choice:
    """How a polar factor is found (see `covmerge.maths.linalg.polar`)."""
    short, long = sorted((d_out, d_in))
    whole = spectrum_choice(d_out, d_in, short, itemsize, device)
    symmetric = symmetric_cost(long, short, device)
    flops = _float64(device) * (2.0 * symmetric + 2.0 * short * short * long)
    # Cholesky factors that show where the spectrum begins, and one more.
    flops += steps_cost(short, device) + _float64(device) * 5.0 * short**3 / 3
    held = (5 * short * short + 2 * short * min(long, 1024)) * 8 + short * long * itemsize
    routes = {whole.taken: whole.cost, "products": Cost(flops, held)}
    return Choice("UVᵀ", routes, _cheapest(routes), f"the cheaper on {device}, if it tells")


def inverse_choice(side: int, rows: int, device: str = "cpu") -> Choice:
    """How rows `(rows, side)` are divided by a semi-definite system (see `covmerge.maths.linalg.pinv`).

    Each Cholesky route factorises twice: once to see that no eigenvalue is cut off.
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
    """How rows `(rows, side)` are divided where eigenvalues are cut off (see `linalg.pinv`)."""
    # The sign, whose square is read; five Cholesky factors, four of which only show something.
    beside = symmetric_cost(side, side, device) + 5.0 * side**3 / 3 + 4.0 * rows * side * side
    flops = steps_cost(side, device) + _float64(device) * beside
    routes = {
        "eigen64": inverse_choice(side, rows, device).routes["eigen64"],
        "projector64": Cost(flops, (5 * side * side + 2 * rows * side) * 8),
    }
    why = f"the cheaper on {device}, if it tells"
    return Choice("B A†, cut off", routes, _cheapest(routes), why)


def steps_cost(side: int, device: str = "cpu") -> float:
    """FLOPs of the iteration of `linalg.by_products` on a matrix `(side, side)` in float64."""
    step = symmetric_cost(side, side, device) + 2.0 * side**3
    return _float64(device) * STEPS * step + _BEGUN.get(device, 0.0)


def factored_choice(d_out: int, d_in: int, ranks: Sequence[int], itemsize: int) -> Choice:
    """What the updates of adapters are written in (see `covmerge.maths.methods.factored`)."""
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
    """Every question that a layer of this shape raises; with `rank`, of adapters of that rank."""
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
    """Rows of a strip of a symmetric product `(n, n)`: all where launches cost more than strips save."""
    if device != "cpu":
        return n
    return min(n, max(_LEAST_STRIP, min(_LARGEST_STRIP, n // _STRIPS)))


def symmetric_cost(m: int, n: int, device: str = "cpu") -> float:
    """FLOPs of RᵀR by strips, R `(m, n)`."""
    return 1.0 * m * n * (n + triangle_block(n, device))


def sums_cost(route: str, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Cost of forming ΣR_tC_t and ΣC_t (see `covmerge.maths.covariance.normal`)."""
    root = d_out * d_in * itemsize
    if route == "dual":
        m = count * d_out
        return Cost(symmetric_cost(d_in, m), (m * d_in + m * m + d_out * m) * itemsize + root)
    cube = cube_choice(d_out, d_in, itemsize).cost
    gram = d_in * d_in * itemsize
    return Cost(count * cube.flops, gram + cube.workspace + 2 * root)


def solve_cost(route: str, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Cost of a Cholesky solve of the system for d_out right-hand sides."""
    side = count * d_out if route == "dual" else d_in
    flops = side**3 / 3 + 2.0 * d_out * side * side
    if route == "dual":
        flops += 2.0 * d_out * side * d_in  # back from the row space
    return Cost(flops, 2 * d_out * side * itemsize)


def pinv_cost(d_out: int, d_in: int, count: int) -> Cost:
    """Cost of (ΣRC)(ΣC)† where eigenvalues are cut off: sums and eigenproblem in float64."""
    choice = system_choice(d_out, d_in, count, 8)
    side = count * d_out if choice.taken == "dual" else d_in
    sums = sums_cost(choice.taken, d_out, d_in, count, 8)
    eigen = inverse_choice(side, d_out).routes["eigen64"]
    return Cost(FLOAT64 * sums.flops, sums.workspace) + eigen


def eigh_cost(side: int, device: str = "cpu") -> Cost:
    """Cost of a full symmetric eigenproblem in float64: divide and conquer, LAPACK's workspace.

    Of a device that is slow at it, what products it could do in that time.
    """
    flops = _float64(device) * _eigenproblem(side, device)
    return Cost(flops, 5 * side * side * 8, flops)


def _float64(device: str) -> float:
    """What an operation of float64 takes there, in those of float32."""
    return _FLOAT64.get(device, FLOAT64)


def _eigenproblem(side: int, device: str) -> float:
    """FLOPs that its products could do in the time of one, in its own precision."""
    return 9.0 * side**3 * _beside_cpu(device) + _COLUMN.get(device, 0.0) * side


def _beside_cpu(device: str) -> float:
    """How many times as many products a large eigenproblem takes there as on a CPU."""
    return EIGENPROBLEM.get(device, _LAPACK) / _LAPACK


def svd_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Cost of the k leading singular triplets (see `covmerge.maths.linalg.spectral`)."""
    return spectrum_choice(d_out, d_in, k, itemsize).cost


def leading_cost(d_out: int, d_in: int, k: int, itemsize: int) -> Cost:
    """Cost of the k leading singular triplets alone (see `covmerge.maths.linalg.spectral.leading_svd`)."""
    return leading_choice(d_out, d_in, k, itemsize).cost


def metric_cost(d_out: int, d_in: int, itemsize: int) -> Cost:
    """Cost of two spectra of ΔC^½, C `(d_in, d_in)` in float64 (see `covmerge.maths.linalg.metric`).

    FLOPs where C has a Cholesky factor, memory where it has none.
    """
    matrix, inputs = d_out * d_in, d_in * d_in
    root = FLOAT64 * d_in**3 / 3
    if d_out <= d_in and itemsize != torch.float64.itemsize:
        products = 1.0 * matrix * d_in + FLOAT64 * symmetric_cost(d_in, d_out)
        spectrum = eigh_cost(d_out) + Cost(products, 2 * matrix * 8)
        held = inputs * (8 + itemsize)
        return Cost(root + 2 * spectrum.flops, spectrum.workspace + held, 2 * spectrum.eigen)
    spectrum = svd_cost(d_out, d_in, min(d_out, d_in), itemsize)
    return Cost(
        root + 2 * (spectrum.flops + 1.0 * matrix * d_in),
        max(eigh_cost(d_in).workspace, spectrum.workspace + matrix * itemsize)
        + inputs * (8 + itemsize),
        2 * spectrum.eigen,
    )


def dots_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Cost of all ⟨Δ_tC, Δ_u⟩ (see `covmerge.maths.linalg.metric`)."""
    flops = 1.0 * count * d_out * d_in * (d_in + 2 * count)
    rows = min(count * d_out, max(DOTS_BLOCK // d_in, DOTS_ROWS))
    return Cost(flops, 2 * (rows * d_in + d_in * d_in) * itemsize)


def joint_cost(d: int, columns: int, count: int, itemsize: int) -> Cost:
    """Cost of U and σ of `count` matrices `(d, columns)` side by side (see `linalg.joint`)."""
    wide = count * columns
    if itemsize == torch.float64.itemsize:
        eigen = FLOAT64 * 20.0 * d**3
        products = FLOAT64 * 2.0 * d * d * wide
        return Cost(products + eigen, (2 * d * wide + 6 * d * d) * 8, eigen)
    gram = Cost(FLOAT64 * symmetric_cost(wide, d), d * columns * 8)
    return gram + eigh_cost(d)


def polar_cost(d_out: int, d_in: int, k: int, itemsize: int, *, apart: int = 0) -> Cost:
    """Cost of U diag(s) V with the polar factors of U `(d_out, k)` and V `(k, d_in)`.

    Of U's columns `apart` are orthonormal already, and to the others.
    """
    others = max(1, k - apart)
    left = svd_cost(d_out, others, min(d_out, others), itemsize)
    right = svd_cost(k, d_in, min(k, d_in), itemsize)
    products = 2.0 * others * d_out * min(d_out, others)
    products += 2.0 * k * d_in * (min(d_in, k) + d_out)
    # The vectors, their stack, and its polar factor, of which the solver has one more.
    held = 4 * k * (d_out + d_in) * itemsize
    return Cost(
        left.flops + right.flops + products,
        max(left.workspace, right.workspace) + held,
        left.eigen + right.eigen,
    )


def _cheapest(routes: Mapping[str, Cost]) -> str:
    return min(routes, key=lambda name: routes[name].flops)
