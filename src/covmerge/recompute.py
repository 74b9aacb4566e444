"""A merged model held against its sources: some of its tensors are computed again, in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from covmerge.checkpoints import Checkpoint, open_checkpoint
from covmerge.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.diagnostics import Check
from covmerge.engine import read_inputs, run_surveys
from covmerge.engine.worker import compute
from covmerge.errors import InputError
from covmerge.job import context_of
from covmerge.linalg.lapack import norm
from covmerge.output import OpenCheckpoints, open_checkpoints, statistics_of
from covmerge.plan import Merge, Plan, WorkItem, build_plan
from covmerge.recipe import Recipe, parse_recipe
from covmerge.types import Json, TensorHeader

# Of the norm of a merged update: what a merge in float32 may be off by.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Distance:
    """How far the stored rows of a tensor are from those computed again, in squared norms."""

    error: float = 0.0
    update: float = 0.0
    weights: float = 0.0

    def __add__(self, other: _Distance) -> _Distance:
        return _Distance(
            self.error + other.error, self.update + other.update, self.weights + other.weights
        )


def recompute(folder: str | Path, *, tensors: int = 8) -> Check:
    """Compute some tensors of a merged model again, from its sources, and compare.

    The sources must be those of the merge, by their hashes. Their plan is made anew from the
    recorded recipe, thresholds over the whole model are taken again, and the methods run in float64.

    Args:
        folder: the output.
        tensors: how many are taken, evenly, of those that were merged.

    Returns:
        A check that names the tensors that are not what the sources give.

    Raises:
        InputError: not a merged model of covmerge, or a source that is gone, or is another by now.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    recipe = _pinned(parse_recipe(manifest["recipe"], origin=str(folder / MANIFEST_NAME)), manifest)
    if recipe.output.format == "adapter":
        raise InputError(
            f"{folder} is an adapter, and only merged models are computed again: verify it without "
            "--deep"
        )
    with _sources_of(recipe) as checkpoints:
        checkpoints.materialize()
        _check_sources(checkpoints, manifest)
        exact = recipe.model_copy(update={"dtype": "float64"})
        plan = build_plan(exact, checkpoints.base, checkpoints.experts, checkpoints.statistics)
        if [tensor.name for tensor in plan.tensors] != list(manifest["tensors"]):
            return Check("recomputed", ok=False, detail="the sources give other tensors than these")
        chosen = _evenly([t.name for t in plan.tensors if isinstance(t.action, Merge)], tensors)
        with closing(open_checkpoint(folder)) as output:
            found = _distances(plan, checkpoints, output, chosen)
        compute_eps = torch.finfo(getattr(torch, recipe.dtype)).eps
        shares = {
            name: _share(distance, output.headers[name].dtype, compute_eps)
            for name, distance in found.items()
        }
    wrong = [f"'{name}' is {_of(found[name])}" for name, share in shares.items() if share > 1.0]
    if wrong:
        more = f" and {len(wrong) - 5} more" if wrong[5:] else ""
        detail = f"not what the sources give in float64: {'; '.join(wrong[:5])}{more}"
        return Check("recomputed", ok=False, detail=detail)
    merged = sum(isinstance(tensor.action, Merge) for tensor in plan.tensors)
    return Check(
        "recomputed",
        ok=True,
        detail=f"{len(chosen)} of {merged} merged tensors are what the sources give in float64",
    )


@contextmanager
def _sources_of(recipe: Recipe) -> Generator[OpenCheckpoints]:
    """Open base and experts as they were given to the merge."""
    experts = {name: expert.source for name, expert in recipe.experts.items()}
    given = [recipe.base, *experts.values()]
    with ExitStack() as stack:
        try:
            opened = open_checkpoints(recipe.base, experts, statistics_of(recipe.experts))
            checkpoints = stack.enter_context(opened)
        except InputError as error:
            # A state dict has no place: "<state dict>".
            if all(source.startswith("<") or Path(source).is_absolute() for source in given):
                raise
            raise InputError(
                f"a source of the merge cannot be opened from {Path.cwd()}, and they are recorded as they "
                f"were given to it: run this in the folder of the merge. {error}"
            ) from error
        yield checkpoints


def _pinned(recipe: Recipe, manifest: Mapping[str, Any]) -> Recipe:
    """The recipe with sources of the Hub at the commits that were merged."""

    def at(key: str, source: str) -> str:
        commit = manifest["sources"].get(key, {}).get("content", {}).get("revision")
        return source if commit is None else f"{source.partition('@')[0]}@{commit}"

    experts = {
        name: expert.model_copy(update={"source": at(f"expert {name}", expert.source)})
        for name, expert in recipe.experts.items()
    }
    return recipe.model_copy(update={"base": at("base", recipe.base), "experts": experts})


def _check_sources(checkpoints: OpenCheckpoints, manifest: Mapping[str, Any]) -> None:
    """Refuse sources that are not those of the merge."""
    recorded: Mapping[str, Mapping[str, Any]] = manifest["sources"]
    now: dict[str, Json] = {key: dict(one.fingerprint()) for key, one in checkpoints.all()}
    now |= {f"statistics {n}": file.identity() for n, file in checkpoints.statistics.items()}
    for key, content in now.items():
        if recorded.get(key, {}).get("content") != content:
            raise InputError(
                f"{key} is not what was merged: its content has another hash than {MANIFEST_NAME} "
                "records. Put the source back, or verify without --deep"
            )


def _distances(
    plan: Plan, checkpoints: OpenCheckpoints, output: Checkpoint, chosen: Iterable[str]
) -> dict[str, _Distance]:
    sources = checkpoints.sources()
    context = context_of(plan, torch.device("cpu"))
    thresholds = run_surveys(
        [plan],
        sources,
        context,
        lambda what, size: None,
        lanes=1,
        in_flight=2 * max(item.read_bytes for item in plan.items),
    )
    context = replace(context, thresholds=thresholds)
    found: defaultdict[str, _Distance] = defaultdict(_Distance)
    wanted = set(chosen)
    for item in plan.items:
        if item.tensor.name in wanted:
            stored = output.read(item.tensor.name, item.rows)
            (result,) = compute([_unrounded(item)], read_inputs([item], sources), context)
            merged: Any = result.stats["merged"]
            rounded = result.rows.to(stored.dtype).double()
            found[item.tensor.name] += _Distance(
                norm(stored.double() - rounded) ** 2, merged, norm(rounded) ** 2
            )
    return found


def _unrounded(item: WorkItem) -> WorkItem:
    """The item with a result in float64."""
    output = item.tensor.output
    header = TensorHeader(output.name, output.shape, torch.float64)
    return replace(item, tensor=replace(item.tensor, output=header))


def _share(distance: _Distance, stored: torch.dtype, compute_eps: float) -> float:
    """How much of what it may be off by a tensor is off by.

    Its computation may be off by e = TOLERANCE · ‖Δ‖ + 4 eps ‖W‖. Storage rounds both results; of
    entries that e moves over the middle of two numbers the difference is the distance of these,
    together √(e · eps' ‖W‖) on average.
    """
    weights = sqrt(distance.weights)
    error = TOLERANCE * sqrt(distance.update) + 4 * compute_eps * weights
    allowed = error + sqrt(error * torch.finfo(stored).eps * weights)
    return sqrt(distance.error) / allowed if allowed else float(distance.error > 0) * 2


def _of(distance: _Distance) -> str:
    size = sqrt(distance.update)
    off = sqrt(distance.error)
    return f"off by {off:.2g}, where its update has norm {size:.2g}"


def _evenly(names: list[str], count: int) -> list[str]:
    """Take so many, from the first to the last."""
    count = min(count, len(names))
    steps = max(1, count - 1)
    return [names[place * (len(names) - 1) // steps] for place in range(count)]
