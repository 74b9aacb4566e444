"""Compare several methods on the same experts, reading each tensor once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from covmerge.base.errors import InputError, RecipeError
from covmerge.base.findings import Fit
from covmerge.base.memory import peak_memory
from covmerge.base.settings import Hint
from covmerge.base.table import Table, Tabular, result_html
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_comparison, read_manifest
from covmerge.files.checkpoints.staging import Staging, check_not_input, remove_remains
from covmerge.files.stores.address import local_path
from covmerge.files.stores.local import LocalFolder
from covmerge.maths.measures.retention import overall
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.registry import Kernel
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.varied import shown_parameters
from covmerge.plan.recipe import Recipe, dump_recipe, read_call
from covmerge.plan.recipe.parts import split
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import NoOutput, room_for
from covmerge.run.engine.run import Figures, RunResult
from covmerge.run.export.files import write_manifest
from covmerge.run.judgement.judge import check_fit
from covmerge.run.output import OutputFiles
from covmerge.run.scoring.job import (
    NO_PROGRESS,
    SavedScores,
    ScoreProgress,
    candidates,
    check_scorers,
    score_models,
)
from covmerge.run.scoring.scorer import Scorer
from covmerge.run.scoring.table import SCORES_NAME, ScoreTable
from covmerge.run.sources import OpenCheckpoints
from covmerge.run.verification.files import check_files, hash_files
from covmerge.run.work import Work

# Methods that run together share intermediate results of a layer (`LinearGroup.once`): the spectrum of the
# sum of the updates, each update's leading singular triplets, their polar factors, and the experts' Gram
# matrices for the retention. This is an upper bound on their memory, in copies of the layer's inputs.
SHARED_COPIES = 5
_LABEL = re.compile(r"[\w.=+-]{1,150}")  # a folder name that is valid on every system


@dataclass(frozen=True)
class Row:
    """One method's row in the comparison.

    Attributes:
        label: name of the row and of its folder: the method's name, then the parameters given with it.
        method: name of the method.
        parameters: all parameters of the method; those of the recipe's rules are in the manifest.
        norm: ‖W̄ − W_0‖_F over all merged tensors.
        cosines: cosine between the merged update and each expert's update, over all merged tensors.
        stable_rank: mean of ‖M‖²_F/σ₁² over the merged update's matrices; None if there are none.
        retention: by expert, the predicted share of the expert's contribution that survives
            (`covmerge.maths.measures.retention`).
        retention_by_layer: retention by matrix and expert; None where the expert did not change the
            matrix, or has no part in it.
        seconds: time of the method's mathematics; all methods share reading, global passes and writing.
        workspace: the most bytes that the method needs beside a tensor's inputs and result, by its cost
            model.
        folder: folder of the merged model; None if none was written.
    """

    label: str
    method: str
    parameters: Mapping[str, Json]
    norm: float
    cosines: Mapping[str, float]
    stable_rank: float | None
    retention: Mapping[str, float]
    retention_by_layer: Mapping[str, Mapping[str, float | None]] = field(repr=False)
    seconds: float
    workspace: int
    folder: str | None


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """The result of a comparison.

    Attributes:
        path: the folder with a model per method; None if none were written.
        rows: one per method, in the order in which the methods were given.
        update_norms: ‖Δ_t‖_F by expert, over all merged tensors.
        left_out: methods that `all` includes but that cannot run here, each with the reason.
        run: seconds and memory of the whole comparison.
        notes: facts that a reader should know.
        warnings: problems that may make the results worse, and what to do about them.
        adapters: names of the experts that are adapters; their predictions do not agree with accuracy.
        scores: scores of the models; None if no scorer was given.
    """

    path: Path | None
    rows: tuple[Row, ...]
    update_norms: Mapping[str, float]
    left_out: Mapping[str, str]
    run: Figures
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    adapters: tuple[str, ...]
    scores: ScoreTable | None = None

    @property
    def recommended(self) -> str | None:
        """The label of the row with the highest mean score over tasks; None without scores.

        Predictions recommend no method: nobody has shown that they rank methods on sets like yours.
        """
        if self.scores is None or not self.scores.columns:
            return None
        return self.scores.best(self.scores.columns[-1], among={row.label for row in self.rows})

    def __repr__(self) -> str:
        labels, best = some([row.label for row in self.rows]), self.recommended
        where = "" if self.path is None else f", in {self.path}"
        advice = "" if best is None else f"; recommended: {best}"
        return f"<Comparison: {labels} of {some(self.update_norms)}{where}{advice}>"

    def table(self) -> Table:
        """Return one row per entry: parameters, norm, cost, and each expert's cosine and retention."""
        experts = list(self.update_norms)
        columns = ("label", "method", "parameters", "norm", "stable_rank", "seconds", "workspace")
        by_expert = [f"{what} {name}" for what in ("cosine", "retention") for name in experts]
        return Table(
            (*columns, *by_expert),
            tuple(
                (
                    row.label,
                    row.method,
                    json.dumps(row.parameters),
                    row.norm,
                    row.stable_rank,
                    row.seconds,
                    row.workspace,
                    *(row.cosines[name] for name in experts),
                    *(row.retention.get(name) for name in experts),
                )
                for row in self.rows
            ),
        )

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        said = [("warning", text) for text in self.warnings]
        said += [(f"no {name}", why) for name, why in self.left_out.items()]
        return result_html(
            self,
            (f"{label}: {text}" for label, text in said),
            more="" if self.scores is None else self.scores.html(),
            drawn=("norm", "seconds", "retention"),
            most=len(self.rows),
        )

    def as_json(self) -> dict[str, Json]:
        """Return the comparison as plain JSON."""
        return {
            "path": None if self.path is None else str(self.path),
            "methods": [asdict(row) for row in self.rows],
            "recommended": self.recommended,
            "update_norms": dict(self.update_norms),
            "left_out": dict(self.left_out),
            "adapters": list(self.adapters),
            **({} if self.scores is None else {"scores": self.scores.as_json()}),
            "run": cast("Mapping[str, Json]", dict(self.run)),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Entry:
    """A method with the given parameters that a comparison will run; `label` names its row and folder."""

    method: str
    parameters: Mapping[str, Any]
    label: str


# A method alone, or a method with its own parameters. Several entries may name one method.
Wanted = str | Kernel | tuple[str | Kernel, Mapping[str, Any]]


def choose_methods(
    wanted: str | Sequence[Wanted],
    parameters: Mapping[str, Mapping[str, Any]],
    statistics: Mapping[str, StatisticsFile],
    experts: int,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """Return the entries to compare, and the methods of `all` that cannot run, each with the reason.

    Raises:
        RecipeError: a method is unknown, an entry is named twice, or parameters are given for a method
            that is not compared.
    """
    left_out: dict[str, str] = {}
    if wanted == "all":
        reasons = {method.name: _cannot_run(method, statistics, experts) for method in registry}
        left_out = {name: reason for name, reason in reasons.items() if reason is not None}
        left_out |= registry.broken
        given: Sequence[Wanted] = [name for name in reasons if name not in left_out]
    else:
        if isinstance(wanted, Mapping):
            raise _no_method(wanted)
        if not isinstance(cast("object", wanted), Iterable):
            raise RecipeError(f"methods: {wanted!r} is no list: pass [METHOD, ...]")
        given = split(wanted) if isinstance(wanted, str) else wanted
    if not given:
        raise RecipeError("no methods to compare: name some, or `all`")
    asked = [_asked(one) for one in given]
    functions: dict[str, object] = {}
    for name, _, what in asked:
        if callable(what) and functions.setdefault(name, what) is not what:
            raise RecipeError(f"two functions are called '{name}': give each a name of its own")
    names = [name for name, _, _ in asked]
    entries = tuple(
        _entry(name, values, parameters, alone=names.count(name) == 1) for name, values, _ in asked
    )
    labels = [entry.label for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise RecipeError(f"method '{label}' is named twice: name it once")
    for name in parameters:
        if name not in names:
            raise RecipeError(f"parameters for '{name}', which is not compared: {names}")
    return entries, left_out


def _asked(wanted: object) -> tuple[str, Mapping[str, Any], object]:
    """Return a method's name, the parameters given with it, and the name or function that was given."""
    nothing: object = {}
    pair = cast("tuple[object, ...]", wanted) if isinstance(wanted, tuple) else (wanted, nothing)
    what, values = pair if len(pair) == 2 else (None, None)
    if not isinstance(values, Mapping) or not (isinstance(what, str) or callable(what)):
        raise _no_method(cast("object", wanted))
    parameters = cast("Mapping[str, Any]", values)
    if not isinstance(what, str):
        return registry.name_of(what), parameters, what
    name, parameters = read_call(what, parameters)
    if name in ("", "all"):
        alone = "`all` stands alone"
        raise RecipeError(alone if name else "a name is missing between two commas, or at an end")
    return name, parameters, name


def _no_method(wanted: object) -> RecipeError:
    return RecipeError(
        f"{wanted!r} is no method: write its name, 'task_arithmetic(scale=0.3)' or "
        "('task_arithmetic', {'scale': 0.3})"
    )


def _entry(
    name: str, given: Mapping[str, Any], parameters: Mapping[str, Mapping[str, Any]], *, alone: bool
) -> Entry:
    """Resolve an entry; `alone` says that its method has no other entry."""
    method = registry.get(name)
    values = {**parameters.get(method.name, {}), **given}
    resolved = method.resolve(values)
    label = "-".join([method.name, *(f"{key}={resolved[key]}" for key in given)])
    if alone and not _LABEL.fullmatch(label):  # a list of numbers, for example
        label = method.name
    if not _LABEL.fullmatch(label):
        raise RecipeError(
            f"'{label}' cannot name a folder: give these values by {Hint('parameters')}"
        )
    return Entry(method.name, values, label)


def _cannot_run(
    method: Method, statistics: Mapping[str, StatisticsFile], experts: int
) -> str | None:
    if not method.takes(experts):
        return f"merges {method.experts_text}, and the recipe has {experts}"
    if method.writes_masks:
        return "gives a model per expert, not one for all"
    if method.sees == "weights":
        return "sees the models' weights and not their updates: name it to have it compared"
    if method.data == "none":
        return None
    if statistics and all(file.names(method.data) for file in statistics.values()):
        return None
    return f"needs statistics ({method.data}) of every expert"


@dataclass(frozen=True)
class CompareJob:
    """A comparison as `covmerge.compare` runs it: a recipe, and the methods that replace its method."""

    recipe: Recipe
    methods: str | Sequence[Wanted] = "all"
    parameters: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )
    out: Path | None = None
    scorer: Scorer | None = None
    bounds: bool = False
    scorers: int = 1
    scoring: ScoreProgress = NO_PROGRESS
    options: RunOptions = field(default_factory=RunOptions)

    def run(self, checkpoints: OpenCheckpoints) -> Comparison:
        """Merge by every method, and score the models if a scorer is given.

        Raises:
            InputError: an input is wrong; no output is left behind.
            CheckFailed: one of the models failed its verification.
        """
        entries, left_out = choose_methods(
            self.methods, self.parameters, checkpoints.statistics, len(self.recipe.experts)
        )
        if self.scorer is None:
            for name, given in (("bounds", self.bounds), ("scorers", self.scorers != 1)):
                if given:
                    raise RecipeError(
                        f"{Hint(name)} is for scores: pass {Hint('score')} too, or leave it out"
                    )
            return self._merged(entries, left_out, checkpoints)
        if self.out is None:
            raise RecipeError(
                f"scores are of models in a folder: pass {Hint('out', 'DIR')}, which gets one for each "
                "method"
            )
        self.scorer.check()
        check_scorers(self.scorer, self.scorers)
        local_path(self.out)
        saved = SavedScores.read(self.out / SCORES_NAME)  # before --overwrite replaces the folder
        comparison = self._merged(entries, left_out, checkpoints)
        models, notes = candidates(self.out, [e.label for e in entries], bounds=self.bounds)
        scores = score_models(models, self.scorer, self.out, saved, self.scorers, self.scoring)
        return replace(
            comparison, scores=scores, notes=(*comparison.notes, *notes, *scores.notes())
        )

    def _merged(
        self, entries: Sequence[Entry], left_out: Mapping[str, str], checkpoints: OpenCheckpoints
    ) -> Comparison:
        """Merge, or read the models of an earlier run if the options say to resume."""
        if self.out is None:
            self.options.check_in_memory()
        recipes = [
            self.recipe.model_copy(
                update={"method": entry.method, "parameters": dict(entry.parameters)}
            )
            for entry in entries
        ]
        if self.out is not None:
            if self.options.resume and (self.out / MANIFEST_NAME).is_file():
                remove_remains(self.out)
                plans, checkpoints = checkpoints.plans(recipes, whole=True)
                return stored(self.out, self.recipe, entries, checkpoints, plans)
            local_path(self.out)
            check_not_input(self.out, checkpoints.paths())
            Staging(self.out, overwrite=self.options.overwrite).check()
        plans, checkpoints = checkpoints.plans(recipes, whole=True)
        memory = self.options.memory(plans, shared=SHARED_COPIES)
        work = Work(plans, checkpoints, memory, self.options)
        if self.out is None:
            checkpoints.materialize()
            with closing(work.executor()) as executor:
                done, _ = work.run([NoOutput() for _ in plans], executor, {}, compare=True)
            fit = check_fit(plans[0], done[0].items, checkpoints, written=False)
            return self._comparison(entries, work, done, left_out, fit)
        return self._to_disk(self.out, entries, work, left_out)

    def _to_disk(
        self, out: Path, entries: Sequence[Entry], work: Work, left_out: Mapping[str, str]
    ) -> Comparison:
        plans, checkpoints = work.plans, work.checkpoints
        if not self.options.overwrite:
            room_for(plans, out).check()
        # A comparison has no journal, so an interrupted one leaves no output.
        with Staging(out, overwrite=self.options.overwrite) as staging:
            checkpoints.materialize()
            models = [
                OutputFiles(staging.store.inside(entry.label), plan, checkpoints)
                for entry, plan in zip(entries, plans, strict=True)
            ]
            outputs = [model.output for model in models]
            with closing(work.executor()) as executor:
                done, hashes = work.run(outputs, executor, checkpoints.contents(), compare=True)
            sources = checkpoints.recorded(hashes)
            fit = check_fit(plans[0], done[0].items, checkpoints)
            notes: list[str] = []
            for entry, model, model_result in zip(entries, models, done, strict=True):
                # A single merge fails if its output equals the base; a comparison reports this as a result.
                result = model.finish(
                    model_result,
                    sources,
                    work.memory,
                    staging.out.output.inside(entry.label),
                    fit=fit,
                    may_equal_base=True,
                )
                if result.verification is not None and not result.verification.ok:
                    notes.append(f"method '{entry.label}' gives the base")
            comparison = self._comparison(entries, work, done, left_out, fit)
            comparison = replace(comparison, notes=(*comparison.notes, *notes))
            write_manifest(
                staging.store,
                {
                    "covmerge": __version__,
                    "recipe": dump_recipe(self.recipe),
                    "sources": sources,
                    "comparison": comparison.as_json(),
                    "asked": [asdict(entry) for entry in entries],
                },
            )
            staging.commit()
        return comparison

    def _comparison(
        self,
        entries: Sequence[Entry],
        work: Work,
        done: Sequence[RunResult],
        left_out: Mapping[str, str],
        fit: Fit,
    ) -> Comparison:
        together = zip(entries, work.plans, done, strict=True)
        rows = tuple(_row(one.label, plan, result, self.out) for one, plan, result in together)
        first = done[0]
        return Comparison(
            path=self.out,
            rows=rows,
            update_norms=_norms(first.items),
            left_out=left_out,
            run={
                **first.times,
                "compute_seconds": sum(result.times["compute_seconds"] for result in done),
                "peak_memory": peak_memory(),
                "expected_peak_memory": work.memory.peak,
            },
            warnings=fit.warnings,
            notes=(*dict.fromkeys(note for plan in work.plans for note in plan.notes), *fit.notes),
            adapters=tuple(work.checkpoints.adapters),
        )


def stored(
    out: Path,
    recipe: Recipe,
    entries: Sequence[Entry],
    checkpoints: OpenCheckpoints,
    plans: Sequence[Plan],
) -> Comparison:
    """Read the comparison in a folder, if it has these experts and methods.

    Raises:
        InputError: the comparison has other experts or methods, a source or a model file changed since it
            was written, or the folder holds something else.
    """
    manifest = read_comparison(out)
    asked = [json.loads(json.dumps(asdict(entry))) for entry in entries]
    if manifest["recipe"] != dump_recipe(recipe) or manifest.get("asked") != asked:
        raise RecipeError(
            f"{out} holds models of other experts or methods: pass {Hint('overwrite')} to merge anew, "
            "where scores of equal models are kept, or name another folder"
        )
    _check_unchanged(out, manifest["sources"], entries, checkpoints, plans)
    found = manifest["comparison"]
    try:
        return Comparison(
            path=out,
            rows=tuple(Row(**row) for row in found["methods"]),
            update_norms=found["update_norms"],
            left_out=found["left_out"],
            run=found["run"],
            notes=(*found["notes"], f"the models in {out} were merged by an earlier run"),
            warnings=tuple(found["warnings"]),
            adapters=tuple(found["adapters"]),
        )
    except (KeyError, TypeError) as error:
        raise RecipeError(
            f"{out / MANIFEST_NAME} was written by another version: pass {Hint('overwrite')} to merge anew"
        ) from error


def _check_unchanged(
    out: Path,
    recorded: Mapping[str, Mapping[str, Any]],
    entries: Sequence[Entry],
    checkpoints: OpenCheckpoints,
    plans: Sequence[Plan],
) -> None:
    """Raise if a source, the code of a method, or a file of a model changed after the merge."""
    for key in checkpoints.changed(recorded):
        raise InputError(
            f"{key} changed since the models in {out} were merged: pass {Hint('overwrite')} to merge anew"
        )
    for entry, plan in zip(entries, plans, strict=True):
        store = LocalFolder(out / entry.label)
        manifest = read_manifest(store)
        files = manifest.get("files", {})
        found = check_files(store, {"files": files}, hash_files(store, files))
        if not found.ok:
            raise InputError(
                f"{store} is not as it was written: {found.detail}. Pass {Hint('overwrite')} to merge "
                "anew, where scores of equal models are kept"
            )
        if manifest.get("extensions", []) != [origin.as_json() for origin in plan.origins]:
            raise InputError(
                f"the code of {entry.label} changed since the models in {out} were merged: pass "
                f"{Hint('overwrite')} to merge anew"
            )


def _row(label: str, plan: Plan, done: RunResult, out: Path | None) -> Row:
    items = [cast("Mapping[str, Any]", item) for item in done.items if "merged" in item]
    norm = sqrt(sum(item["merged"] for item in items))
    sizes = _norms(done.items)
    dots = {name: sum(item["dots"].get(name, 0.0) for item in items) for name in sizes}
    ranks = [rank for item in items for rank in item.get("stable_ranks", ())]
    name = plan.recipe.method
    layers = {
        layer: {expert: shares.get(expert) for expert in sizes}
        for layer, shares in _retention_by_layer(plan, done.items).items()
    }
    return Row(
        label=label,
        method=name,
        parameters=shown_parameters(name, plan.recipe.parameters, plan.family),
        norm=norm,
        cosines={e: dots[e] / (norm * sizes[e]) if norm * sizes[e] else 0.0 for e in sizes},
        stable_rank=fmean(ranks) if ranks else None,
        retention={
            expert: share
            for expert in sizes
            if (share := overall(layer[expert] for layer in layers.values())) is not None
        },
        retention_by_layer=layers,
        seconds=done.times["compute_seconds"],
        workspace=max(item.workspace for item in plan.items),
        folder=None if out is None else str(out / label),
    )


def _retention_by_layer(
    plan: Plan, done: Sequence[Mapping[str, Json]]
) -> dict[str, Mapping[str, float | None]]:
    """Return each expert's retention by matrix; matrices of a stacked tensor get an index, `name[0]`."""
    found: dict[str, list[Mapping[str, float | None]]] = {}
    for item, stats in zip(plan.items, done, strict=True):
        if "retention" in stats:
            shares = cast("list[Mapping[str, float | None]]", stats["retention"])
            found.setdefault(item.tensor.name, []).extend(shares)
    return {
        name if len(matrices) == 1 else f"{name}[{place}]": matrix
        for name, matrices in found.items()
        for place, matrix in enumerate(matrices)
    }


def _norms(items: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Return ‖Δ_t‖_F by expert over all items."""
    squares: dict[str, float] = {}
    for item in items:
        for expert, square in cast("Mapping[str, float]", item.get("updates", {})).items():
            squares[expert] = squares.get(expert, 0.0) + square
    return {expert: sqrt(square) for expert, square in squares.items()}
