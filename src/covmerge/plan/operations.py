"""What is done with the operands of a piece of work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covmerge.methods import registry
from covmerge.plan.operands import Operand
from covmerge.tensors import MatrixLayout


@dataclass(frozen=True)
class Merge:
    """Merge a tensor by a method.

    Attributes:
        method: registered name.
        parameters: all of the method's parameters, resolved.
        layout: how the tensor holds `(d_out, d_in)` matrices; None: any shape, as it lies.
    """

    method: str
    parameters: Mapping[str, Any]
    layout: MatrixLayout | None

    @property
    def key(self) -> str:
        """Method and parameters: all tensors of one key share one survey."""
        return json.dumps([self.method, dict(self.parameters)], sort_keys=True)

    @property
    def writes_masks(self) -> bool:
        """Whether the method gives a mask per expert beside the merged update."""
        return registry.get(self.method).writes_masks


@dataclass(frozen=True)
class Copy:
    """Take the base operand as it is."""


@dataclass(frozen=True)
class Count:
    """Count magnitudes for the survey of a merge: a reduction, which writes nothing.

    Attributes:
        merge: what the survey is for.
        plan: which of the plans that run together asks for it.
    """

    merge: Merge
    plan: int = 0


@dataclass(frozen=True)
class Redo:
    """A merge that an inspection repeats in one part of it, to show its spectrum beside the merged one.

    Attributes:
        method: registered name.
        parameters: all of its parameters, resolved.
    """

    method: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Look:
    """Measure updates, and a merged model; nothing is merged.

    Attributes:
        merged: the merged model's tensor; None: there is no such model.
        spectra: whether singular values are taken, which is most of the work.
        redo: what is merged again where they are.
    """

    merged: Operand | None = None
    spectra: bool = False
    redo: Redo | None = None


Operation = Merge | Copy | Count | Look
