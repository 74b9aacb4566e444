"""What a piece of work reads: tensors of sources, of which the base is one."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "base"
MERGED = "merged"


def expert_key(name: str) -> str:
    """Return the key of an expert among the sources of a run, and in reports."""
    return f"expert {name}"


@dataclass(frozen=True)
class Operand:
    """A tensor of a source.

    Attributes:
        source: key of the source: `BASE`, `expert_key(name)`, or `MERGED`.
        tensor: its name there; None: the source has none, and counts as unchanged.
        rows: how many rows it has; row i stands for row i of the output. None: no rows are asked for.
        weight: share of its update in the merge; 1 is neutral.
    """

    source: str
    tensor: str | None
    rows: int | None = None
    weight: float = 1.0

    def held(self, rows: range | None) -> range | None:
        """Return those of some rows of the output that it has.

        Example:
            >>> Operand(BASE, "embedding", rows=5).held(range(3, 8))
            range(3, 5)
        """
        if rows is None or self.rows is None:
            return rows
        return range(min(rows.start, self.rows), min(rows.stop, self.rows))
