"""Several recipes of mergekit's in one file: stages that name each other's outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn, cast

from covmerge.base.errors import RecipeError
from covmerge.base.identifiers import EXPERT_NAME, EXPERT_NAME_LENGTH
from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.methods import named
from covmerge.plan.recipe.mergekit.models import Places
from covmerge.plan.recipe.mergekit.pieces import read_theirs
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.strict_yaml import Origin


@dataclass(frozen=True)
class Document:
    """One of the recipes.

    Attributes:
        data: as in the file.
        origin: where that is.
        log: how strictly it is read.
    """

    data: Any
    origin: Origin
    log: ImportLog

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe, without its name."""
        data = self.data
        if not isinstance(data, dict):
            self.refuse("a document is no mapping; each is a recipe of mergekit's")
        return {k: v for k, v in cast("dict[str, Any]", data).items() if k != "name"}

    @cached_property
    def name(self) -> str | None:
        """What the others call its output; None of one that makes the last."""
        data = cast("dict[str, Any]", self.data) if self.recipe else {}
        if "name" not in data:
            return None
        name = data["name"]
        named = isinstance(name, str) and re.fullmatch(EXPERT_NAME, name)
        if not named or len(name) > EXPERT_NAME_LENGTH:
            self.refuse(
                f"`name` is {shown(name)}, and a folder is called so: use up to {EXPERT_NAME_LENGTH} "
                "letters, digits, '.', '_' or '-', and no '.' at the start",
                "name",
            )
        return name

    @cached_property
    def sources(self) -> set[str]:
        """The models that it names."""
        part = Part(self.recipe, (), self.origin, ImportLog(lenient=True))
        theirs = read_theirs(part, named(part), Places())
        found = {source.model for piece in theirs.pieces for source in piece.sources}
        found |= set() if theirs.base is None else {theirs.base}
        return {path for model in found for path in (model.model, model.lora) if path is not None}

    def refuse(self, problem: str, *keys: str) -> NoReturn:
        """Raise a RecipeError for this document."""
        raise RecipeError(f"{self.origin.where(keys)}: {problem}")


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Return recipes in an order in which each comes after those whose outputs it names; the unnamed last.

    Raises:
        RecipeError: several without a name, a name that is taken, or recipes that need each other.
    """
    stages: dict[str, Document] = {}
    last: list[Document] = []
    for document in documents:
        if document.name is None:
            last.append(document)
        elif any(
            document.name.casefold() == name.casefold() for name in stages
        ):  # one folder, on many disks
            document.refuse(f"the name {document.name!r} is taken by another document", "name")
        else:
            stages[document.name] = document
    if len(last) > 1:
        documents[-1].refuse(
            f"{len(last)} of the {len(documents)} documents have no `name`: one alone may be without, "
            "which makes the output"
        )
    return [stages[name] for name in _sorted(stages)] + last


def _sorted(stages: dict[str, Document]) -> Iterable[str]:
    needed = {name: sorted(stage.sources & stages.keys()) for name, stage in stages.items()}
    try:
        return list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        round_trip = cast("list[str]", error.args[1])
        stages[round_trip[0]].refuse(
            f"stages that need each other's output: {' → '.join(reversed(round_trip))}", "name"
        )
