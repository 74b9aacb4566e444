"""One HTML page on which users weight experts and see at once how much of each is retained.

scene  the page's data on base, experts and a merged model, measured once
file   the page on the disk
page   its parts: the text, its style, and scripts that predict and write recipes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest, recorded_in
from covmerge.front.viewer.file import FILE_NAME, check_page, write_html
from covmerge.front.viewer.scene import Choice, Group, Scene, choice_of
from covmerge.plan.recipe import Recipe, load_recipe, parse_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import InspectJob, open_merged
from covmerge.run.inspection.result import Inspection
from covmerge.run.sources import OpenCheckpoints, open_recipe

# Measure base, experts and a merged model for the page.


@dataclass(frozen=True)
class ViewJob:
    """The sources to inspect, and the options of the run."""

    path: Path
    options: RunOptions = field(default_factory=RunOptions)

    def run(self) -> Scene:
        """Read every matrix once, and return the scene."""
        if not self.path.exists():
            raise InputError(
                f"{self.path} is not there: name a folder that `covmerge merge` wrote, or a recipe file"
            )
        if not self.path.is_dir():
            recipe = load_recipe(self.path)
            with open_recipe(recipe) as checkpoints:
                return self._scene(recipe, checkpoints, self.path.name)
        manifest = read_manifest(self.path)
        recipe = parse_recipe(manifest["recipe"], origin=str(self.path / MANIFEST_NAME))
        with recorded_in(self.path / MANIFEST_NAME), open_recipe(recipe) as checkpoints:
            return self._scene(recipe, checkpoints, self.path.resolve().name, self.path)

    def _scene(
        self, recipe: Recipe, checkpoints: OpenCheckpoints, title: str, out: Path | None = None
    ) -> Scene:
        if recipe.slices:
            raise InputError(
                f"{self.path}: the recipe stacks layers anew ('slices'), and a page weighs the experts "
                "of whole models: look at it by covmerge report"
            )
        job = InspectJob(recipe=recipe, spectra="none", options=self.options, quadratics=True)
        if out is None:
            inspection = job.run(checkpoints)
        else:
            with open_merged(out, checkpoints.base) as output:
                inspection = job.run(checkpoints, merged=output)
        _check(inspection)
        sources = {"": _place(recipe.base or "", checkpoints.base.identity()["kind"])}
        for name, expert in recipe.experts.items():
            if name in inspection.compared:
                kind = checkpoints.experts[name].identity()["kind"]
                sources[name] = _place(expert.source, kind)
        merged = None if out is None else _free("merged", recipe)
        if out is not None and merged is not None and recipe.tokenizer is None:
            sources[merged] = str(out.absolute())
        return Scene(title, recipe, inspection, sources, merged)


def _check(inspection: Inspection) -> None:
    if not inspection.compared:
        text = some((f.text for f in inspection.faults), 1)
        raise InputError(f"no expert fits the base, so that there is nothing to weigh: {text}")
    if not inspection.matrices:
        raise InputError(
            f"{some(inspection.experts)}: no tensor is a matrix of a layer, and nothing is predicted of "
            "others"
        )


def _place(source: str, kind: object) -> str:
    """Return the name of a source for a recipe in any folder."""
    known = kind in ("hub", "remote")
    return source if known else str(Path(source).expanduser().absolute())


def _free(name: str, recipe: Recipe) -> str:
    """Return a name that no expert has."""
    taken, found, count = {expert.lower() for expert in recipe.experts}, name, 1
    while found in taken:
        count += 1
        found = f"{name}-{count}"
    return found


__all__ = [
    "FILE_NAME",
    "Choice",
    "Group",
    "Scene",
    "ViewJob",
    "check_page",
    "choice_of",
    "write_html",
]
