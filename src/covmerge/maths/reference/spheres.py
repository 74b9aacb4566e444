"""Methods that follow a sphere of the models' weights; they return W̄."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.reference.algebra import lengths
from covmerge.maths.reference.weights import given, shares_of


def slerp(group: LinearGroup, *, t: float = 0.5, arithmetic: str | None = None) -> Tensor:
    """sin((1 − t)θ)/sin θ W_0 + sin(tθ)/sin θ W_1; a line where |cos θ| > 0.9995."""
    W0, (W1,) = given(group, arithmetic)
    a, b = W0.double(), W1.double()
    norms = [size if (size := float(lengths(x))) > 1e-8 else 1.0 for x in (a, b)]
    cosine = max(-1.0, min(1.0, float((a / norms[0] * (b / norms[1])).sum())))
    if abs(cosine) > 0.9995:
        merged = (1 - t) * a + t * b
    else:
        theta = math.acos(cosine)
        merged = (math.sin((1 - t) * theta) * a + math.sin(t * theta) * b) / math.sin(theta)
    return merged.to(W0.dtype).double()


def between(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The same along the last axis, for each vector; a straight line where 1 − cos² ≤ 1e-16."""
    u, v = (x / lengths(x, -1, keep=True).clamp(min=1e-7) for x in (a, b))
    cosine = (u * v).sum(-1, keepdim=True).clamp(-1, 1)
    line = (1 - cosine**2) <= 1e-16
    theta = torch.where(line, torch.zeros_like(cosine), cosine).acos()
    arc = (((1 - t) * theta).sin() * a + (t * theta).sin() * b) / theta.sin()
    return torch.where(line, (1 - t) * a + t * b, arc)


def nuslerp(
    group: LinearGroup,
    *,
    weight: float | list[float] = 1.0,
    by: str = "tensor",
    around: str = "zero",
    arithmetic: str | None = None,
) -> Tensor:
    """The arc from W_1 to W_2, at the place that their weights give."""
    W0, models = given(group, arithmetic)
    w1, w2 = shares_of(weight, group)
    t = 0.5 if abs(w1 + w2) < 1e-6 else w2 / (w1 + w2)
    centre = W0 if around == "base" else torch.zeros_like(W0)
    a, b = (W - centre for W in models)
    if by == "tensor" or W0.dim() == 0:
        merged = between(a.flatten(), b.flatten(), t).view(W0.shape)
    elif by == "rows":
        merged = between(a, b, t)
    else:
        merged = between(a.transpose(0, -1), b.transpose(0, -1), t).transpose(0, -1)
    return (centre + merged).double()


def multislerp(
    group: LinearGroup,
    *,
    weight: float | list[float] = 1.0,
    normalize_weights: bool = True,
    eps: float = 1e-8,
    around: str = "zero",
    arithmetic: str | None = None,
) -> Tensor:
    """The weighted mean in the tangent space at the normalised linear mean of the directions."""
    W0, models = given(group, arithmetic)
    if len(models) == 1:
        return models[0].double()
    centre = W0 if around == "base" else torch.zeros_like(W0)
    x = [W - centre for W in models]
    w = torch.tensor(shares_of(weight, group), dtype=W0.dtype)
    w = w / w.sum() if normalize_weights else w
    sizes = [lengths(v) for v in x]
    u = [v / (size + eps) for v, size in zip(x, sizes, strict=True)]
    m = torch.stack([share * v for share, v in zip(w, u, strict=True)]).sum(0)
    if float(lengths(m)) < eps:
        return (centre + w[0] * x[0] + w[1] * x[1]).double()
    m = m / lengths(m)
    tangents = [v - (v * m).sum() * m for v in u]
    v = torch.stack([share * tangent for share, tangent in zip(w, tangents, strict=True)]).sum(0)
    n = lengths(v) + eps
    turned = m * n.cos() + v * (n.sin() / n)
    return (centre + turned * (torch.stack(sizes) * w).sum()).double()


def karcher(
    group: LinearGroup,
    *,
    max_iter: int = 10,
    tol: float = 1e-5,
    base_place: int | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """The fixed point of log and exp maps on the sphere, at the mean of the norms.

    In half precision every operation rounds, and so does each number before it is used.
    """

    def rounded(number: float) -> Tensor:
        return torch.tensor(number, dtype=torch.float64).to(W0.dtype)

    W0, models = given(group, arithmetic)
    if base_place is not None:
        models.insert(base_place, W0)
    if len(models) == 1:
        return models[0].double()
    sizes = [float(lengths(W.double())) for W in models]
    u = [(W / r).to(W.dtype) for W, r in zip(models, sizes, strict=True) if r > tol]
    if not u:
        return torch.zeros_like(W0).double()
    m = torch.zeros_like(W0)
    for v in u:
        m += 1 / len(u) * v
    m = m / lengths(m.double()) if float(lengths(m.double())) >= tol else u[0]
    for _ in range(max_iter):
        cosines = [torch.dot(m.flatten(), v.flatten()).clamp(-1, 1) for v in u]
        angles = [c.acos() for c in cosines]
        v = torch.zeros_like(m)
        for c, theta, each in zip(cosines, angles, u, strict=True):
            if theta >= tol:
                v += 1 / len(u) * (theta / theta.sin()) * (each - c * m)
        n = float(lengths(v.double()))
        if n < tol:
            break
        m = rounded(math.cos(n)) * m + rounded(math.sin(n)) * (v / n)
        m = m / lengths(m.double())
    return (rounded(sum(sizes) / len(sizes)) * m).double()


REFERENCES = {"slerp": slerp, "nuslerp": nuslerp, "multislerp": multislerp, "karcher": karcher}
