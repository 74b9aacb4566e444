"""The data of the page: measured once, and enough to predict every weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covmerge.base.findings import Severity
from covmerge.base.text import counted, printable
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.tensors.layers import layer_name
from covmerge.front.reporting.grid import panels
from covmerge.front.reporting.page import RETENTION
from covmerge.front.viewer.choice import Choice, choice_of
from covmerge.plan.recipe import Recipe
from covmerge.run.inspection.result import Inspection, LayerView

_DIGITS = 9  # of which float32 products have seven


@dataclass(frozen=True)
class Scene:
    """A base and experts, measured, and a merged model where there is one.

    Attributes:
        title: a name for people.
        recipe: what was inspected.
        inspection: of its matrices, with `LayerView.quadratics`.
        sources: where base (under "") and experts lie, wherever a recipe is put; the merged model's
            under `merged`, where a recipe may have it as an expert.
        merged: what the merged model is called among the experts; None: there is none.
    """

    title: str
    recipe: Recipe
    inspection: Inspection
    sources: Mapping[str, str]
    merged: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the recipe is a weighted sum that the page shows as it is."""
        return choice_of(self.recipe) is not None

    @property
    def start(self) -> Choice:
        """The recipe's own weights, or the mean of the experts."""
        found = choice_of(self.recipe)
        if found is not None:
            return found
        return Choice(method="average", weights=dict.fromkeys(self.inspection.compared, 1.0))

    def as_json(self) -> dict[str, Json]:
        """All of it, for the page; names in it are strangers' and no markup."""
        inspection, merged = self.inspection, self.merged
        columns = [*inspection.compared, *([] if merged is None else [merged])]
        layers = inspection.matrices
        shown = panels((layer.name, number) for number, layer in enumerate(layers))
        return {
            "title": printable(self.title),
            "version": __version__,
            "method": self.recipe.method,
            "exact": self.exact,
            "experts": list(inspection.compared),
            "columns": columns,
            "merged": merged,
            "movable": merged in self.sources,
            "start": self.start.model_dump(mode="json"),
            "layers": [_layer(layer) for layer in layers],
            "others": [_named(layer) for layer in inspection.layers if not layer.is_matrix],
            "panels": [
                {
                    "label": printable(panel.label),
                    "numbered": panel.numbered,
                    "cells": {
                        printable(column): list(layers) for column, layers in panel.columns.items()
                    },
                }
                for panel in shown
            ],
            "kept": RETENTION,
            "caveats": list(self._caveats()),
            "findings": [
                {"severity": str(f.severity), "who": f.expert or "", "text": printable(f.text)}
                for f in inspection.findings
                if f.severity is not Severity.NOTE
            ],
        }

    def _caveats(self) -> Sequence[str]:
        """What the numbers of this recipe are not."""
        recipe, found = self.recipe, list[str]()
        others = len(self.inspection.layers) - len(self.inspection.matrices)
        if others:
            found.append(
                f"Of {counted(others, 'tensor')} that {'is' if others == 1 else 'are'} no matrix of a "
                "layer (norms, biases, embeddings) nothing is predicted; a recipe gives them the same "
                "weights."
            )
        if recipe.output.format == "adapter":
            found.append(
                "The recipe writes an adapter: what a rank cuts off of the sum is not predicted."
            )
        if recipe.output.quantise != "none":
            found.append("The recipe writes quantised weights: what that rounds is not predicted.")
        if self.merged is not None and self.merged not in self.sources:
            found.append(
                "The merged model has tokens of its own, so that no recipe can have it as an expert: it "
                "is shown, and not moved."
            )
        return found


def _layer(layer: LayerView) -> dict[str, Json]:
    forms = [layer.quadratics[name] for name in layer.experts]
    return {**_named(layer), "forms": [None if form is None else _triangle(form) for form in forms]}


def _named(layer: LayerView) -> dict[str, Json]:
    """What a tensor is called, for patterns as it is and for people; and where it lies."""
    found = layer_name(layer.tensor)
    place = None if found is None else [found.stack, found.index, found.rest]
    return {
        "tensor": layer.tensor,
        "name": printable(layer.name),
        "role": layer.role,
        "place": place,
    }


def _triangle(form: Sequence[Sequence[float]]) -> list[Json]:
    """Q_s, which is symmetric, as its lower half."""
    return [[_short(value) for value in row[: t + 1]] for t, row in enumerate(form)]


def _short(value: Any) -> float:
    return float(f"{value:.{_DIGITS}g}")
