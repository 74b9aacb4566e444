"""The operands of a work item, and the operation on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from covmerge.files.tensors.views import MatrixLayout
from covmerge.maths.methods import Method, registry
from covmerge.maths.steps import StepUse, with_steps

BASE = "base"
MERGED = "merged"


def expert_key(name: str) -> str:
    """Return an expert's key among the sources of a run and in reports."""
    return f"expert {name}"


@dataclass(frozen=True)
class Operand:
    """A tensor of one source."""

    source: str  # key of the source: `BASE`, `expert_key(name)`, or `MERGED`
    tensor: str | None  # its name in the source; None: the source lacks it, and counts as unchanged
    # Its number of rows, where row i stands for row i of the output. None: no limit is known.
    rows: int | None = None
    weight: float = 1.0  # weight of its update in the merge; 1 is neutral

    def held(self, rows: range | None) -> range | None:
        """Return the part of a range of the output's rows that the operand has.

        Example:
            >>> Operand(BASE, "embedding", rows=5).held(range(3, 8))
            range(3, 5)
        """
        if rows is None or self.rows is None:
            return rows
        return range(min(rows.start, self.rows), min(rows.stop, self.rows))


@dataclass(frozen=True)
class Merge:
    """Merging of a tensor by a method."""

    method: str
    parameters: Mapping[str, Any]  # the values of all of them
    # How the tensor contains `(d_out, d_in)` matrices; None: it is merged in its own shape.
    layout: MatrixLayout | None
    before: tuple[StepUse, ...] = ()
    after: tuple[StepUse, ...] = ()
    scale: float = 1.0  # factor of the merged update: the weight of a single expert

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False

    @property
    def merge(self) -> Merge:
        return self

    @property
    def procedure(self) -> Method:
        """The method together with the steps around it."""
        return self.around(registry.get(self.method))

    def around(self, method: Method) -> Method:
        """Return a method, or a substitute for it, with the steps around it."""
        return with_steps(method, self.before, self.after)

    @property
    def key(self) -> str:
        """Method, parameters and steps as text; all tensors with the same key share one global pass."""
        used = [[use.name, dict(use.parameters)] for use in (*self.before, *self.after)]
        return json.dumps([self.method, dict(self.parameters), *used], sort_keys=True)

    @property
    def half(self) -> str | None:
        """The half-precision dtype to which each step of the method rounds, or None."""
        found: object = self.parameters.get("arithmetic")
        return str(found) if found in ("float16", "bfloat16") else None

    @property
    def unrounded(self) -> Merge:
        """The same merge with steps in the dtype of the computation."""
        return replace(self, parameters={**self.parameters, "arithmetic": None})

    @property
    def writes_masks(self) -> bool:
        return registry.get(self.method).writes_masks


@dataclass(frozen=True)
class Copy:
    """Copying of the base's tensor.

    Each operation tells whether it `copies`, whether it is `compared`, and which `merge` it does or
    prepares, if any.
    """

    # Whether the experts' tensors are read too, and compared with the base's.
    compared: bool = False
    reshaped: tuple[str, ...] = ()  # experts whose tensor has another shape
    # Name of the merged floating-point tensor that scales this tensor's codes; "": there is none.
    scale: str = ""

    copies: ClassVar[bool] = True
    merge: ClassVar[None] = None


@dataclass(frozen=True)
class Count:
    """Counting of magnitudes for the global pass of a merge: a reduction, which writes nothing."""

    merge: Merge  # the merge that needs the global pass
    plan: int = 0  # the number of that merge's plan among those that run together

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False


@dataclass(frozen=True)
class Inspect:
    """Measuring of updates and of a merged model; nothing is merged."""

    merged: Operand | None = None  # the merged model's tensor; None: there is no such model
    spectra: bool = False  # whether singular values are computed, which is most of the work
    # A merge to repeat for the updates, to show its spectrum beside the merged model's.
    redo: Merge | None = None
    attempt: Merge | None = None  # a merge to try on the updates, for its diagnostics
    # Whether to measure what any weighted sum of the updates would keep of each update.
    quadratics: bool = False
    # All experts that are measured; an expert without this tensor has an update of zero there.
    experts: tuple[str, ...] = ()

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False
    merge: ClassVar[None] = None


Operation = Merge | Copy | Count | Inspect
