"""What inputs of several covariances see of matrices of one shape, along a leading axis.

As `covmerge.maths.linalg.metric` of one, where C has a Cholesky factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covmerge.maths.linalg.batched import all_finite, factorize_all, per_member
from covmerge.maths.linalg.batched_spectra import Spectra
from covmerge.maths.linalg.metric import row_blocks


@dataclass(frozen=True)
class Metrics:
    """C `(n, d_in, d_in)`, symmetric positive semi-definite to rounding.

    Attributes:
        covariances: C in float64, each of mean eigenvalue 1.
        sizes: the square root of what each C was divided by `(n,)`.
        factors: L, lower triangular, with LLᵀ = C, float64; arbitrary where there is none.
        definite: whether there is one `(n,)`.
    """

    covariances: Tensor
    sizes: Tensor
    factors: Tensor
    definite: Tensor

    @classmethod
    def of(cls, covariances: Tensor, beside: Sequence[float] | None = None) -> Metrics:
        """The metrics of covariances of any scale, and of so many times I beside each."""
        whole = covariances.to(torch.float64, copy=True)
        if beside is not None:
            whole.diagonal(dim1=1, dim2=2).add_(per_member(beside, whole, axes=1))
        means = whole.diagonal(dim1=1, dim2=2).mean(1)
        whole.div_(per_member(means, whole))
        factors, definite = factorize_all(whole, whole.new_zeros(len(whole)))
        return cls(whole, means.sqrt(), factors, definite & all_finite(factors))

    def only(self, kept: Sequence[int]) -> Metrics:
        """Return some of them."""
        if len(kept) == len(self.definite):
            return self
        return Metrics(
            self.covariances[kept], self.sizes[kept], self.factors[kept], self.definite[kept]
        )

    def dots(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """⟨Δ_tC^½, Δ_uC^½⟩ `(n, T, T)` of every layer's updates, float64, row block by row block.

        Example:
            >>> seen = Metrics.of(torch.diag_embed(torch.tensor([[1.0, 3.0], [1.0, 1.0]])))
            >>> seen.dots([[torch.ones(1, 2)]] * 2).flatten().tolist()
            [2.0, 2.0]
        """
        n, count = len(layers), len(layers[0])
        total = self.covariances.new_zeros(n, count, count)
        inputs = self.covariances.to(layers[0][0].dtype)
        for rows in row_blocks(layers[0]):
            block = torch.stack([torch.cat([update[rows] for update in own]) for own in layers])
            seen = block @ inputs
            total += seen.reshape(n, count, -1) @ block.reshape(n, count, -1).mT
        return (total + total.mT).div_(2.0).cpu()

    def seen(self, updates: Tensor) -> Tensor:
        """ΔC^½ `(n, d_out, d_in)`, up to a rotation of its columns, in Δ's dtype."""
        return updates @ self.factors.to(updates.dtype)


def lifted(
    found: Spectra,
    updates: Tensor,
    counts: Sequence[int],
    lifts: Sequence[Tensor],
    beyond: Sequence[float],
) -> Tensor:
    """Return U_k diag(lift) U_kᵀΔ + beyond · (I − U_kU_kᵀ)Δ of each Δ `(n, d_out, d_in)`, with its own k.

    Args:
        found: the singular values and directions of ΔC^½.
        updates: Δ.
        counts: k of each.
        lifts: of each `(k,)`.
        beyond: of each.

    Example:
        >>> from covmerge.maths.linalg.batched_spectra import spectra
        >>> updates = torch.diag_embed(torch.tensor([[3.0, 2.0], [4.0, 1.0]]))
        >>> lifts = [torch.tensor([1.0, 2.0]), torch.tensor([2.0])]
        >>> lifted(spectra(updates), updates, [2, 1], lifts, [0.0, 0.5]).diagonal(dim1=1, dim2=2).tolist()
        [[3.0, 4.0], [8.0, 0.5]]
    """
    left = found.left(counts)
    rest = per_member(beyond, updates)
    times = pad_sequence([*lifts], batch_first=True).to(updates)
    weighted = left * (times - rest.squeeze(2)).unsqueeze(1)
    d_out, d_in = updates.shape[1:]
    # The order that is the cheaper one.
    if d_out * (left.shape[2] + d_in) < 2 * left.shape[2] * d_in:
        merged = (weighted @ left.mT) @ updates
    else:
        merged = weighted @ (left.mT @ updates)
    return merged.addcmul_(updates, rest) if any(beyond) else merged
