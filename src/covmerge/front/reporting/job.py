"""Read base, experts and output again, and report what the merge did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest, recorded_in
from covmerge.files.stores.disk import replace_file
from covmerge.front.reporting.data import LayerCost, Report
from covmerge.maths.methods import registry
from covmerge.maths.steps.compose import steps_around
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.varied import Settings
from covmerge.plan.recipe import Recipe, parse_recipe
from covmerge.plan.recipe.varied import is_varied
from covmerge.run.engine.entries import diagnostics_in
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import InspectJob, SpectraOf, open_merged
from covmerge.run.sources import open_recipe
from covmerge.run.verification import Verification, verify


@dataclass(frozen=True)
class ReportJob:
    """An output of covmerge to report on, and the options of the run."""

    folder: Path
    spectra: SpectraOf = "some"
    options: RunOptions = field(default_factory=RunOptions)
    # seconds of the merge's mathematics by tensor, if the merge was just run
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    # other measurements of that run, as in `MergeResult.run`
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # the output's verification, if it was just made; None: verify the output now
    verification: Verification | None = None
    # largest share of the merge's FLOPs that "some" spectra may take; None: the limit of an inspection
    share: float | None = None

    def run(self) -> Report:
        """Verify the output, and read it with the base and the experts that its manifest names."""
        manifest = read_manifest(self.folder)
        recipe = parse_recipe(manifest["recipe"], origin=str(self.folder / MANIFEST_NAME))
        with recorded_in(self.folder / MANIFEST_NAME), open_recipe(recipe) as checkpoints:
            plan, _ = checkpoints.plan(recipe)
            job = InspectJob(
                recipe=recipe,
                spectra=self.spectra,
                options=self.options,
                spectral_flops=None if self.share is None else self.share * plan.flops,
            )
            with open_merged(self.folder, checkpoints.base) as output:
                inspection = job.run(
                    checkpoints, merged=output, before=unrefined(recipe, manifest["family"])
                )
            verification = self.verification or verify(self.folder, base=checkpoints.base)
        return Report(
            title=self.folder.resolve().name,
            inspection=inspection,
            manifest=manifest,
            diagnostics={one.tensor: one for one in diagnostics_in(plan, manifest["tensors"])},
            verification=verification,
            costs=_costs(plan, self.seconds),
            run=self.measured,
        )


def unrefined(recipe: Recipe, family: str | None) -> Merge | None:
    """Return the merge without spectral refinement; None if it has none, needs the base, or varies."""
    settings = Settings(registry.get(recipe.method), recipe.parameters, family)
    parameters = settings.shown()
    before, after = steps_around(recipe.before, recipe.after)
    merge = Merge(recipe.method, {**parameters, "refine": False}, None, before, after)
    varied = settings.varied or any(is_varied(expert.weight) for expert in recipe.experts.values())
    if not parameters.get("refine") or merge.procedure.needs_base or varied:
        return None
    return merge


def _costs(plan: Plan, seconds: Mapping[str, float]) -> dict[str, LayerCost]:
    costs: dict[str, LayerCost] = {}
    for item in plan.items:
        name = item.tensor.name
        before = costs.get(name, LayerCost(seconds.get(name), 0, 0.0))
        costs[name] = LayerCost(
            before.seconds, max(before.memory, item.memory), before.flops + item.flops
        )
    return costs


# The page as a file; matplotlib and Jinja are imported only when a page is written.

FILE_NAME = "report.html"
_GENERATOR = "covmerge "
_HEAD = 2048  # bytes at the beginning of a page that contain the generator


def write_html(report: Report, path: Path, *, overwrite: bool = False) -> None:
    """Write the whole page, or leave everything unchanged."""
    check_page(path, overwrite=overwrite)
    from covmerge.front.reporting.html import render

    replace_file(path, render(report))


def check_page(path: Path, *, overwrite: bool = False) -> None:
    """Check that a page can be written: to a new file, over an earlier page, or with `overwrite`."""
    check_packages()
    check_place(path, FILE_NAME, "report", _GENERATOR, overwrite=overwrite)


def check_place(path: Path, example: str, what: str, generator: str, *, overwrite: bool) -> None:
    """Check that a page may be written to a path, over a page by the same `generator` too.

    `example` is a file name for the message, `what` the kind of page.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / example}")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}: make it first")
    if overwrite or not path.exists():
        return
    with path.open("rb") as file:
        ours = f'<meta name="generator" content="{generator}'.encode() in file.read(_HEAD)
    if not ours:
        raise InputError(
            f"{path} exists and is no {what} of covmerge: pass {Hint('overwrite')} to replace it, or name "
            "another file"
        )


def check_packages() -> None:
    """Check that the packages that a page needs are installed."""
    import_module("covmerge.front.reporting.html")
