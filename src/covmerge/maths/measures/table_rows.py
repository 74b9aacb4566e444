"""Counts of table rows (tokens or positions) that an expert changed: they show what it was trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from covmerge.base.types import Json

_BLOCK = 2**18  # elements that are read together, in float64
# Weight decay is rounded at each step. Changes up to this many roundings in float32 count as decay.
_STEPS = 64


@dataclass(frozen=True)
class TableRows:
    """Counts of the rows of a table that an expert changed.

    Example:
        >>> base = torch.eye(3)
        >>> update = torch.zeros(3, 3)
        >>> update[0] = -0.1 * base[0]  # weight decay
        >>> update[1, 0] = 0.5
        >>> table_rows(base, update, torch.float32)
        TableRows(rows=3, changed=2, turned=1, last=2)
    """

    rows: int
    changed: int  # the number of rows that differ from the base's
    # the number of rows that differ by more than a factor and rounding. An optimiser that gets no
    # gradient for a row leaves it as it is, or shrinks it by weight decay: w ← (1 − ηλ) w.
    turned: int
    last: int  # the place behind the last row that turned; 0: none did

    def __add__(self, after: TableRows) -> TableRows:
        """Return the counts of two tables, the rows of `after` below those of this one."""
        return TableRows(
            self.rows + after.rows,
            self.changed + after.changed,
            self.turned + after.turned,
            self.rows + after.last if after.last else self.last,
        )

    def as_json(self) -> dict[str, Json]:
        """Return the counts as plain JSON."""
        return asdict(self)


def table_rows(base: Tensor, update: Tensor, stored: torch.dtype | None) -> TableRows:
    """Count the rows of an update that are not a multiple of the base's row, w_i + δ_i ≠ c_i w_i.

    `stored` is the dtype in which the expert stores its weights; None: it stores updates.
    """
    step = max(1, _BLOCK // max(1, base.shape[1]))
    found = TableRows(0, 0, 0, 0)
    for start in range(0, len(base), step):
        rows = slice(start, start + step)
        found += _of_block(base[rows].double(), update[rows].double(), stored)
    return found


def _of_block(base: Tensor, update: Tensor, stored: torch.dtype | None) -> TableRows:
    size = (base * base).sum(dim=1).sqrt()
    along = (base * update).sum(dim=1) / (size**2).clamp_min(torch.finfo(torch.float64).tiny)
    rest = ((update - along[:, None] * base) ** 2).sum(dim=1).sqrt()
    eps = 0.0 if stored is None or stored == torch.float64 else torch.finfo(stored).eps
    tolerance = (eps + _STEPS * torch.finfo(torch.float32).eps) * size
    changed, turned = (update != 0).any(dim=1), rest > tolerance
    last = int(turned.nonzero()[-1]) + 1 if bool(turned.any()) else 0
    return TableRows(len(base), int(changed.sum()), int(turned.sum()), last)
