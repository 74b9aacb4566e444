"""What a method made of some rows, as the form of the output asks for it."""

from __future__ import annotations

from math import isfinite, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.errors import TensorError
from covmerge.base.types import Json, LowRank
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.linalg.spectral import truncated_svd
from covmerge.maths.methods.factored import MergedFactors
from covmerge.plan.planning.forms import as_output
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.layer import Change, Layer


class Rows:
    """What a method made of the rows of an item, for its form (`MergedRows`), which asks once.

    Args:
        item: the work.
        merge: its operation.
        layer: the updates that were merged.
        change: what they were merged to; it may be written over.
        unrounded: the same without the rounding of the method's steps, where that is measured.
        compare: whether it is one of several, which are held against the updates.
    """

    def __init__(
        self,
        item: WorkItem,
        merge: Merge,
        layer: Layer,
        change: Change,
        unrounded: Change | None,
        *,
        compare: bool,
    ) -> None:
        self._item = item
        self._merge = merge
        self._layer = layer
        self._change = change
        self._unrounded = unrounded
        self._compare = compare
        self.facts: dict[str, Json] = {**layer.sizes.as_json()}
        if change.matrices:
            self.facts["matrices"] = change.matrices

    def update(self) -> Tensor:
        merged = self._change.dense(self._item, self._merge)
        square = square_norm(merged)
        if not isfinite(square):
            norms = (f"{n}: {sqrt(size):.3g}" for n, size in self._layer.sizes.updates.items())
            raise self.failure(
                "gave NaN or Inf, or numbers whose squares are, from finite updates of norms "
                + ", ".join(norms)
            )
        self.facts["merged"] = square
        if self._compare:
            self.facts |= self._layer.measures.of(merged)
        return merged

    def exact(self) -> Tensor:
        return self._added(self.update())

    def rounded(self) -> Tensor:
        merged = self.update()
        exact = self._added(merged)
        rows = as_output(self._item.tensor.output, exact, "merged weights")
        lossy = rows.dtype != exact.dtype
        lost = torch.sub(exact, rows.to(exact.dtype), out=merged) if lossy else None
        self.facts["rounding"] = 0.0 if lost is None else square_norm(lost)
        return rows.cpu()

    def factors(self, rank: int) -> tuple[LowRank, Tensor]:
        if self._compare:
            dense = self._change.dense(self._item, self._merge)
            self.facts |= self._layer.measures.of(dense)
        delta, layout = self._change.delta, self._merge.layout
        if isinstance(delta, MergedFactors):
            found, sigma = delta.truncated(rank)
            return (found.mT if layout is not None and layout.transposed else found), sigma
        top = truncated_svd(delta.reshape(len(delta), -1), rank, rtol=0.0, equals=False)
        root = top.kept.to(top.left.dtype).sqrt()
        # A result of lower rank than its place in the file: terms that are zero.
        spare = (0, rank - len(root))
        return LowRank(pad(top.left * root, spare), pad(top.right.mT * root, spare).mT), top.sigma

    def mask(self, expert: str) -> Tensor:
        mask = self._change.masks.get(expert)
        return torch.zeros(self._item.shape, dtype=torch.bool) if mask is None else mask

    def failure(self, why: str) -> TensorError:
        return TensorError(
            f"'{self._item.tensor.name}': method '{self._merge.method}' {why}. "
            "Please report this tensor; `average` merges it meanwhile."
        )

    def _added(self, merged: Tensor) -> Tensor:
        """Add the base, in the memory of the update."""
        change, layer = self._change, self._layer
        exact = merged.add_(layer.base()) if change.weights is None else change.weights
        if self._unrounded is not None:
            self.facts["arithmetic"] = self._arithmetic(self._unrounded, exact)
        return exact

    def _arithmetic(self, unrounded: Change, exact: Tensor) -> Json:
        """Squares of what the rounding of a method's steps moved, and of the update without it."""
        update = unrounded.dense(self._item, self._merge)
        square = square_norm(update)
        base = self._layer.base
        whole = update + base() if unrounded.weights is None else unrounded.weights
        return {"lost": square_norm(whole - exact), "update": square}
