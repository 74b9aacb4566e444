"""Operands of a work item, and the operation on them."""

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


@dataclass(frozen=True)
class Merge:
    """Merge a tensor by a method.

    Attributes:
        method: registered name.
        parameters: all of the method's parameters, resolved.
        layout: how the tensor holds `(d_out, d_in)` matrices; None: any shape, as it lies.
        before: steps before the method.
        after: steps after it.
        scale: what the merged update is multiplied by: the weight of an expert that is alone.
    """

    method: str
    parameters: Mapping[str, Any]
    layout: MatrixLayout | None
    before: tuple[StepUse, ...] = ()
    after: tuple[StepUse, ...] = ()
    scale: float = 1.0

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False

    @property
    def merge(self) -> Merge:
        """Itself."""
        return self

    @property
    def procedure(self) -> Method:
        """The method with the steps around it: what is run, and what it needs."""
        return self.around(registry.get(self.method))

    def around(self, method: Method) -> Method:
        """The steps around the method, or around what stands for it."""
        return with_steps(method, self.before, self.after)

    @property
    def key(self) -> str:
        """Method, parameters and steps: all tensors of one key share one global pass."""
        used = [[use.name, dict(use.parameters)] for use in (*self.before, *self.after)]
        return json.dumps([self.method, dict(self.parameters), *used], sort_keys=True)

    @property
    def half(self) -> str | None:
        """The half-precision dtype that each step of the method rounds to, where it has one."""
        found: object = self.parameters.get("arithmetic")
        return str(found) if found in ("float16", "bfloat16") else None

    @property
    def unrounded(self) -> Merge:
        """The same merge with steps in the dtype of the computation."""
        return replace(self, parameters={**self.parameters, "arithmetic": None})

    @property
    def writes_masks(self) -> bool:
        """Whether the method gives a mask per expert beside the merged update."""
        return registry.get(self.method).writes_masks


@dataclass(frozen=True)
class Copy:
    """Take the base operand as it is.

    Each operation says whether it `copies`, whether it is `compared`, and which `merge` it does or counts
    for, if any.

    Attributes:
        compared: whether the experts' tensors are read too, and held against the base's.
        reshaped: experts that have it in another shape.
        scale: a floating-point tensor that is merged, and that scales this one's codes; "" where none does.
    """

    compared: bool = False
    reshaped: tuple[str, ...] = ()
    scale: str = ""

    copies: ClassVar[bool] = True
    merge: ClassVar[None] = None


@dataclass(frozen=True)
class Count:
    """Count magnitudes for the global pass of a merge: a reduction, which writes nothing.

    Attributes:
        merge: what the global pass is for.
        plan: which of the plans that run together asks for it.
    """

    merge: Merge
    plan: int = 0

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False


@dataclass(frozen=True)
class Inspect:
    """Measure updates, and a merged model; nothing is merged.

    Attributes:
        merged: the merged model's tensor; None: there is no such model.
        spectra: whether singular values are taken, which is most of the work.
        redo: a merge to do again where they are, to show its spectrum beside the merged model's.
        attempt: a merge to try where they are, for its diagnostics.
        quadratics: whether it is measured what any weighted sum of the updates would keep of each.
        experts: all that are measured; one that has no part in the tensor has an update of zero there.
    """

    merged: Operand | None = None
    spectra: bool = False
    redo: Merge | None = None
    attempt: Merge | None = None
    quadratics: bool = False
    experts: tuple[str, ...] = ()

    copies: ClassVar[bool] = False
    compared: ClassVar[bool] = False
    merge: ClassVar[None] = None


Operation = Merge | Copy | Count | Inspect
