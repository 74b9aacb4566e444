"""Merged updates as the factors of an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from covmerge.base.errors import TensorError
from covmerge.base.types import Json, LowRank, TensorHeader
from covmerge.files.checkpoints.adapter_layout import AdaptedTensor
from covmerge.maths.linalg.auto import Cost, svd_cost
from covmerge.maths.linalg.stored import stored_as
from covmerge.plan.planning.forms import MODEL, Form, MergedRows, Place, Result

# So many singular values of each layer are kept for the reader: enough to choose a rank by.
_SPECTRUM = 256


@dataclass(frozen=True)
class AdapterFactors(Form):
    """The update ΔW ≈ BA by its factors, as PEFT reads them.

    Attributes:
        place: what the adapter has of the tensor.
        dtype: of the stored factors.
    """

    place: AdaptedTensor
    dtype: torch.dtype
    holds_weights = False
    in_parts = False

    @property
    def adapted(self) -> AdaptedTensor:
        return self.place

    @property
    def rows_together(self) -> int | None:
        return None

    def places(self, output: TensorHeader, rows: range | None) -> tuple[Place, ...]:
        """See `Form.places`; factors are written whole."""
        return tuple(Place(MODEL, header) for header in self.place.headers(self.dtype))

    def cost(self, d_out: int, d_in: int, itemsize: int) -> Cost:
        return svd_cost(d_out, d_in, self.place.rank, itemsize)

    def encode(self, rows: MergedRows, output: TensorHeader) -> Result:
        rank = self.place.rank
        update, sigma = rows.factors(rank)
        try:
            rounded = LowRank(
                stored_as(update.left, self.dtype), stored_as(update.right, self.dtype)
            )
        except OverflowError as error:
            raise TensorError(
                f"'{output.name}': the factors of the merged update overflow {self.dtype} ({error}); "
                "store them in another dtype (--out-dtype float32)"
            ) from error
        energy = sigma.double().square()
        total, kept = float(energy.sum()), float(energy[:rank].sum())
        lost = _rounding(update, rounded)
        if not isfinite(total + lost):
            raise rows.failure("gave NaN or Inf from finite updates")
        adapter: dict[str, Json] = {
            "tensor": self.place.name,
            "rank": rank,
            "discarded_energy": 1.0 - kept / total if total else 0.0,
            "singular_values": [float(value) for value in sigma[:_SPECTRUM]],
        }
        facts: dict[str, Json] = {"merged": total, "rounding": lost, "adapter": adapter}
        pieces = self.place.factors(rounded.to(torch.device("cpu")))
        return Result(tuple(pieces), {**rows.facts, **facts})


def _rounding(exact: LowRank, rounded: LowRank) -> float:
    """‖LR − L̃R̃‖²_F ≈ Σ_j σ_j (‖L_j − L̃_j‖² + ‖R_j − R̃_j‖²), where LᵀL = RRᵀ = diag(σ).

    What is left out are products of errors that do not know of each other; a Gram matrix of all
    would be a third of the work on a layer.
    """
    if rounded.left.dtype == exact.left.dtype:
        return 0.0
    # In float64: squares of long factors overflow float32, though what is stored does not.
    exact, back = exact.to(torch.float64), rounded.to(torch.float64)
    sigma = exact.right.square().sum(dim=1)
    left = (exact.left - back.left).square().sum(dim=0)
    right = (exact.right - back.right).square().sum(dim=1)
    return float((sigma * (left + right)).sum())
