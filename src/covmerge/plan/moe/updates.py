"""Gates `update`: the input direction that each expert's update reads most, without prompts or data."""

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

_READERS = ("gate_proj", "up_proj")  # matrices of an MLP that read its inputs
_BLOCK_ELEMENTS = 1 << 22  # elements of weights held in float64 at once


class OfUpdates:
    """Routers from leading right singular vectors of updates; each layer is computed when first read.

        row_t = ±v_t, v_t the leading eigenvector of G_t = Σ Δ_tᵀΔ_t over gate_proj and up_proj  (float64)

    SMILE (arXiv:2408.10174, section 4) routes by ‖V_kᵀx‖. A linear router can only have k = 1 and
    one sign. The sign is chosen so that vᵀx ≥ 0 for the base's mean embedding x, scaled by the norm
    before the MLP (`before`) if there is one. A zero update gives a zero row.
    """

    def __init__(
        self, sources: Mapping[str | None, Checkpoint], experts: Sequence[str], before: str | None
    ) -> None:
        self._base, self._before = sources[None], before
        self._experts = [(name, sources.get(name)) for name in experts]
        self._found: dict[int, Tensor] = {}
        self._lock = Lock()  # only one G_t is held at once, even if threads read at the same time

    def __call__(self, layer: int) -> Tensor:
        """Return the router of a layer `(experts, hidden)`, float32."""
        with self._lock:
            if layer not in self._found:
                self._found[layer] = torch.stack([*self._rows(f"model.layers.{layer}")])
            return self._found[layer]

    def _rows(self, layer: str) -> Iterator[Tensor]:
        typical = self._mean
        if self._before is not None:
            typical = typical * self._base.read(f"{layer}.{self._before}.weight").double()
        for name, expert in self._experts:
            # Experts are missing only when an output is verified, and its routers are not read then.
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
    """Return the leading eigenvector of G, with the sign that gives it a product ≥ 0 with a typical input.

    G `(n, n)` is positive semi-definite. The result `(n,)` has length 1, or is zero if G is. If the product
    is 0, the largest entry is made positive. All are float64.

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
