"""Gates `update`: what each expert's update reads of a layer's inputs, without prompts or data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.maths.linalg.lapack import eigh, norm
from covmerge.maths.linalg.refined import leading_pairs
from covmerge.maths.linalg.symmetric import add_gram_, mirror_
from covmerge.plan.moe.architectures import EMBEDDING

_READERS = ("gate_proj", "up_proj")  # matrices of an MLP that its inputs go through
_BLOCK_ELEMENTS = 1 << 22  # of weights that are alive in float64 at once


class OfUpdates:
    """Routers by the leading right singular vectors of updates; a layer is computed when it is first read.

        row_t = ±v_t, v_t the leading eigenvector of G_t = Σ Δ_tᵀΔ_t over gate_proj and up_proj  (float64)

    SMILE (arXiv:2408.10174, section 4) routes by ‖V_kᵀx‖, of which a linear router can have k = 1 and one
    sign: that for which the base's mean embedding, scaled by the norm before the MLP (if any), has vᵀx ≥ 0.
    An update of zero reads nothing, and its row is zero.

    Args:
        sources: the dense base (None) and the experts.
        experts: names of all, in order.
        before: what a layer calls the norm before its MLP; None: there is none.
    """

    def __init__(
        self,
        sources: Mapping[str | None, Checkpoint],
        experts: Sequence[str],
        before: str | None,
    ) -> None:
        self._base, self._before = sources[None], before
        self._experts = [(name, sources.get(name)) for name in experts]
        self._found: dict[int, Tensor] = {}
        self._lock = Lock()  # one G_t is alive at once, whoever reads

    def __call__(self, layer: int) -> Tensor:
        """Return the router of a layer `(experts, hidden)`, float32.

        Raises:
            TensorError: weights are not finite.
        """
        with self._lock:
            if layer not in self._found:
                self._found[layer] = torch.stack([*self._rows(f"model.layers.{layer}")])
            return self._found[layer]

    def _rows(self, layer: str) -> Iterator[Tensor]:
        typical = self._mean
        if self._before is not None:
            typical = typical * self._base.read(f"{layer}.{self._before}.weight").double()
        for name, expert in self._experts:
            # An output is verified beside its base alone, and its routers are not read then.
            assert expert is not None
            yield leading_direction(self._gram(layer, name, expert), typical).float()

    def _gram(self, layer: str, name: str, expert: Checkpoint) -> Tensor:
        hidden = len(self._mean)
        total = torch.zeros(hidden, hidden, dtype=torch.float64)
        for part in _READERS:
            matrix = f"{layer}.mlp.{part}.weight"
            for rows in self._base.headers[matrix].row_blocks(_BLOCK_ELEMENTS):
                update = expert.read(matrix, rows).double() - self._base.read(matrix, rows).double()
                if not update.isfinite().all():
                    raise TensorError(
                        f"'{matrix}' of expert '{name}' ({expert.source}), or of the base, holds NaN or "
                        "Inf: leave the expert out, or save it anew"
                    )
                add_gram_(total, update)
        return mirror_(total)

    @cached_property
    def _mean(self) -> Tensor:
        """Mean of the base's embeddings, float64."""
        header = self._base.headers[EMBEDDING]
        total = torch.zeros(header.shape[1], dtype=torch.float64)
        for rows in header.row_blocks(_BLOCK_ELEMENTS):
            total += self._base.read(EMBEDDING, rows).double().sum(0)
        return total / header.shape[0]


def leading_direction(gram: Tensor, typical: Tensor) -> Tensor:
    """Return the leading eigenvector of G, with the sign that gives a typical input a product ≥ 0.

    Args:
        gram: G `(n, n)`, symmetric, semi-definite, float64.
        typical: `(n,)`, float64. At right angles to it, the largest entry is positive.

    Returns:
        `(n,)`, of length 1, float64; zero where G is.

    Example:
        >>> gram = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> leading_direction(gram, torch.tensor([1.0, 5.0], dtype=torch.float64)).tolist()
        [1.0, 0.0]
    """
    if not gram.any():
        return torch.zeros_like(typical)
    pairs = leading_pairs(gram, 1)
    row = eigh(gram)[1][:, -1] if pairs is None else pairs.vectors[:, 0]
    row = row / norm(row)
    towards = float(row @ typical)
    sign = towards if towards else float(row[row.abs().argmax()])
    return row if sign > 0 else -row
