"""Recompute tensors of a merged model from its sources: `covmerge verify --deep`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.errors import CheckpointError, InputError, TensorError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import LinearGroup, Merged, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.manifest import (
    MANIFEST_NAME,
    pinned_source,
    read_manifest,
    recorded_in,
)
from covmerge.files.quantised.view import open_plain
from covmerge.files.quantised.writing.packing import Blocks
from covmerge.files.stores.remote import store_at
from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.methods import Method, registry
from covmerge.maths.reference import REFERENCES
from covmerge.plan.planning.forms import ModelTensor
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import TensorPlan, WorkItem
from covmerge.plan.recipe import Recipe, parse_recipe
from covmerge.run.engine.executor import Batch, Done, Task
from covmerge.run.engine.global_pass import find_thresholds
from covmerge.run.engine.inputs import read_inputs
from covmerge.run.engine.layer import Context
from covmerge.run.engine.selection import Selections
from covmerge.run.engine.threads import Threads
from covmerge.run.engine.worker import work
from covmerge.run.sources import OpenCheckpoints, open_recipe
from covmerge.run.verification import Check
from covmerge.run.verification.verify import late_routers

# The sources of a finished merge are opened from the recorded paths, and must be unchanged.


@contextmanager
def sources_of(recipe: Recipe) -> Generator[OpenCheckpoints]:
    """Open base and experts from the paths that were given to the merge."""
    given = [recipe.base, *(expert.source for expert in recipe.experts.values())]
    with ExitStack() as stack:
        try:
            checkpoints = stack.enter_context(open_recipe(recipe))
        except InputError as error:
            # A state dict has no path; its source is recorded as "<state dict>".
            if all(s is None or s.startswith("<") or Path(s).is_absolute() for s in given):
                raise
            raise InputError(
                f"a source of the merge cannot be opened from {Path.cwd()}, and they are recorded as they "
                f"were given to it: run this in the folder of the merge. {error}"
            ) from error
        yield checkpoints


def pinned(recipe: Recipe, manifest: Mapping[str, Any]) -> Recipe:
    """Return the recipe with each source from the Hub pinned to the commit that was merged."""
    experts = {
        name: expert.model_copy(
            update={"source": pinned_source(manifest, f"expert {name}", expert.source)}
        )
        for name, expert in recipe.experts.items()
    }
    base = None if recipe.base is None else pinned_source(manifest, "base", recipe.base)
    return recipe.model_copy(update={"base": base, "experts": experts})


def check_sources(checkpoints: OpenCheckpoints, manifest: Mapping[str, Any]) -> None:
    """Raise if a source's content or the tokenizers changed after the merge."""
    decided = checkpoints.text.vocabulary
    if decided is not None and manifest.get("vocabulary") != decided.as_json():
        raise InputError(
            "the sources' tokenizers are not what they were when they were merged: put them back, or "
            f"verify without {Hint('deep')}"
        )
    for key in checkpoints.changed(manifest["sources"]):
        raise InputError(
            f"{key} is not what was merged: its content has another hash than {MANIFEST_NAME} "
            f"records. Put the source back, or verify without {Hint('deep')}"
        )


# Choose the tensors to recompute, and decide which of them a reference implementation can compute.

# A reference implementation forms a d × d matrix for every expert, where d is the longer side, and
# multiplies updates with it. These limits bound its float64 numbers (0.8 GB; a few such arrays exist
# at once) and its multiplications (minutes).
_MOST_NUMBERS = 10**8
_MOST_PRODUCTS = 5 * 10**10


def by_reference(name: str) -> Method:
    """Return a registered method whose kernel is its reference implementation on dense updates."""
    method = registry.get(name)

    @wraps(method.kernel)  # keeps the kernel's signature, from which the parameters are read
    def kernel(group: LinearGroup, **parameters: Any) -> Merged:
        return Merged(REFERENCES[name](group, **parameters))

    return replace(method, kernel=kernel, factored="none", writes_masks=False, tensor_pass=None)


def choose(plan: Plan, count: int) -> dict[str, str]:
    """Choose `count` merged tensors, evenly, first those that a reference implementation can compute.

    If a method's reference implementation can compute none of its tensors, these tensors are among the
    first too, so that every method is checked. Return by name why none computes a tensor; "" if one does.
    """
    reasons = {t.name: _beyond_a_reference(t, t.merge) for t in plan.tensors if t.merge is not None}
    methods = {t.name: t.merge.method for t in plan.tensors if t.merge is not None}
    reached = {methods[name] for name, reason in reasons.items() if not reason}
    first = [name for name, reason in reasons.items() if not reason or methods[name] not in reached]
    rest = [name for name in reasons if name not in set(first)]
    chosen = {*_evenly(first, count), *_evenly(rest, count - len(first))}
    return {name: reason for name, reason in reasons.items() if name in chosen}


def _beyond_a_reference(tensor: TensorPlan, merge: Merge) -> str:
    """Return why no reference implementation computes a tensor; "" if one does."""
    if merge.method not in REFERENCES:
        return f"'{merge.method}' has no reference implementation"
    unit = registry.get(merge.method).unit_for(merge.parameters)
    shape, count = tensor.stored.shape, len(tensor.operands)
    numbers = products = 0
    if merge.layout is not None:
        shapes = matrix_shapes(shape, merge.layout)
        steps = merge.parameters["iterations"] if merge.parameters.get("solver") == "adam" else 1
        numbers = count * max(max(sides) ** 2 for sides in shapes)
        products = count * sum(prod(sides) * max(sides) for sides in shapes) * steps
    elif unit == "tensor":
        numbers = count * prod(shape)
    if numbers > _MOST_NUMBERS or products > _MOST_PRODUCTS:
        return f"{' × '.join(map(str, shape))} of {count} experts is too large for one"
    return ""


def _evenly(names: Sequence[str], count: int) -> list[str]:
    """Return `count` evenly spaced names, including the first and the last."""
    count = max(0, min(count, len(names)))
    steps = max(1, count - 1)
    return [names[place * (len(names) - 1) // steps] for place in range(count)]


# Allowed error of a merge in float32, relative to the norm of the merged update.
TOLERANCE = 1e-3
# Number of integers of 8 bits, the most that a scale is multiplied by.
_INTEGERS = 2**8
# Allowed error of a router's entry, relative to the largest of its row: the base that makes the router
# runs in bfloat16, which every processor rounds otherwise.
_ROUTER = 1 / 16


@dataclass(frozen=True)
class _Farthest:
    """The element or block of a tensor that is farthest from its recomputed value."""

    beyond: float = 0.0  # its distance, less what storing it may change
    what: str = "element []"


@dataclass(frozen=True)
class _Distance:
    """The distance between stored and recomputed rows of a tensor, in squared norms."""

    error: float = 0.0
    update: float = 0.0
    weights: float = 0.0
    rounding: float | None = None  # error of rounding to a quantised format; None for plain dtypes
    farthest: _Farthest = field(default_factory=_Farthest)

    def __add__(self, other: _Distance) -> _Distance:
        lost = [part.rounding for part in (self, other) if part.rounding is not None]
        return _Distance(
            self.error + other.error,
            self.update + other.update,
            self.weights + other.weights,
            sum(lost) if lost else None,
            max(self.farthest, other.farthest, key=_beyond),
        )

    def computed(self, compute_eps: float) -> float:
        """Return the allowed error of the computation, e = TOLERANCE · ‖Δ‖ + 4 eps ‖W‖."""
        return TOLERANCE * sqrt(self.update) + 4 * compute_eps * sqrt(self.weights)

    def share(self, stored: torch.dtype, compute_eps: float) -> float:
        """Return the tensor's error relative to its allowed error; above 1 the tensor is wrong.

        The computation may be off by e (`computed`). Storage rounds both results. Where e moves an
        element over the midpoint of two neighbouring numbers, the stored results differ by the distance
        of these numbers. Over the tensor this adds √(e · eps' ‖W‖) on average. A quantised format adds
        √(e · √12 ‖Q(W) − W‖), and as much again because its scales move. A single element, or a block
        with one scale, may be off by no more than the whole matrix: by e, beside what storing it changes
        (`_farthest_element`, `_farthest_block`).
        """
        weights, error = sqrt(self.weights), self.computed(compute_eps)
        if self.rounding is None:
            allowed = error + sqrt(error * torch.finfo(stored).eps * weights)
        else:
            allowed = error + 2 * sqrt(error * sqrt(12 * self.rounding))
        return max(_share(sqrt(self.error), allowed), _share(self.farthest.beyond, error))

    def __str__(self) -> str:
        return (
            f"off by {sqrt(self.error):.2g}, where its update has norm {sqrt(self.update):.2g}, and "
            f"{self.farthest.what} by {self.farthest.beyond:.2g} beside its rounding"
        )


def _beyond(farthest: _Farthest) -> float:
    return farthest.beyond


def _share(found: float, allowed: float) -> float:
    return found / allowed if allowed else float(found != 0) * 2


@dataclass(frozen=True)
class _Tensor:
    """A recomputed tensor; `instead` is why no reference implementation computed it, "" if one did."""

    name: str
    distance: _Distance
    instead: str


def recompute(folder: str | Path, *, tensors: int = 8) -> Check:
    """Recompute some tensors of a merged model from its sources, and compare them with the output.

    The sources must have the hashes that the merge recorded. The plan is made again from the
    recorded recipe, and thresholds over the whole model are computed again. Then the tensors are merged
    by the methods' reference implementations (`covmerge.maths.reference`), which share no code with the
    kernels that merged them. If a method has no reference implementation, or the tensor is too large for
    it, the method's own kernel runs in float64. The check names the tensors that differ from what the
    sources give, and those that no reference implementation computed.

    Raises:
        InputError: not a merged model of covmerge, or a source that is gone, or is another by now.
    """
    store = store_at(folder)
    manifest = read_manifest(store)
    recipe = pinned(parse_recipe(manifest["recipe"], origin=store.where(MANIFEST_NAME)), manifest)
    if recipe.output.format == "adapter":
        raise InputError(
            f"{folder} is an adapter, and only merged models are computed again: verify it without "
            f"{Hint('deep')}"
        )
    with recorded_in(store.where(MANIFEST_NAME)), sources_of(recipe) as checkpoints:
        checkpoints.materialize()
        check_sources(checkpoints, manifest)
        exact = recipe.model_copy(update={"dtype": "float64"})
        plan, checkpoints = checkpoints.plan(exact)
        if [tensor.name for tensor in plan.tensors] != list(manifest["tensors"]):
            return Check("recomputed", ok=False, detail="the sources give other tensors than these")
        with closing(open_plain(folder)) as output:
            found = _compare(plan, checkpoints, output, choose(plan, tensors))
            stored = {tensor.name: output.headers[tensor.name].dtype for tensor in found}
            routers = sorted(late_routers(manifest))
            base = checkpoints.base
            strange = [n for n in routers if not _is_router(output.read(n), base.read(n))]
    eps = torch.finfo(getattr(torch, recipe.dtype)).eps
    # The share of NaN is NaN.
    wrong = [t for t in found if not t.distance.share(stored[t.name], eps) <= 1.0]
    merged = sum(tensor.merge is not None for tensor in plan.tensors)
    detail = _account(found, wrong, merged)
    if strange:
        detail += f"; of the routers these are not: {some(strange, 5, quoted=True)}"
    elif routers:
        detail += f"; so are the routers, {len(routers)} tensors"
    return Check("recomputed", not (wrong or strange), detail)


def _is_router(stored: Tensor, computed: Tensor) -> bool:
    exact = computed.double()
    return bool(
        ((stored.double() - exact).abs() <= _ROUTER * exact.abs().amax(1, keepdim=True)).all()
    )


def _account(found: Sequence[_Tensor], wrong: Sequence[_Tensor], merged: int) -> str:
    by_kernels = [f"'{tensor.name}' ({tensor.instead})" for tensor in found if tensor.instead]
    kernels = f"covmerge's own kernels in float64: {some(by_kernels, 5, between='; ')}"
    if not by_kernels:
        how = "the float64 reference implementations"
    elif len(by_kernels) == len(found):
        how = kernels
    else:
        how = f"the float64 reference implementations, but for {len(by_kernels)} by {kernels}"
    if wrong:
        off = some((f"'{tensor.name}' is {tensor.distance}" for tensor in wrong), 5, between="; ")
        return f"not what the sources give: {off}; computed by {how}"
    return f"{len(found)} of {merged} merged tensors are what the sources give by {how}"


def _compare(
    plan: Plan, checkpoints: OpenCheckpoints, output: Checkpoint, chosen: Mapping[str, str]
) -> list[_Tensor]:
    """Recompute the chosen tensors, by a reference implementation unless `chosen` gives a reason."""
    sources = checkpoints.sources()
    context = Context(plan.compute_dtype, torch.device("cpu"))
    executor = Threads(in_flight=2 * max(item.read_bytes for item in plan.items), lanes=1)

    def count(batches: Sequence[Batch], selections: Selections) -> Generator[Done]:
        return executor.run(enumerate(batches), Task(sources, context, selections=selections))

    thresholds = find_thresholds([plan], count, lambda what, size: None)
    informed = replace(context, thresholds=thresholds)
    items: dict[str, list[WorkItem]] = {name: [] for name in chosen}
    for item in plan.items:
        if item.tensor.key in chosen:
            items[item.tensor.name].append(_unrounded(item))

    forms = {tensor.name: tensor.form for tensor in plan.tensors}

    def distance(name: str, method: Callable[[str], Method]) -> _Distance:
        of_method = replace(informed, method=method)
        form, total = forms[name], _Distance()
        for item in items[name]:
            stored = output.read(name, item.rows)
            (result,) = work((item,), read_inputs([item], sources), of_method)
            merged: Any = result.stats["merged"]
            exact = result.tensors[0]
            back = form.read_back(exact, stored.dtype, item.rows, changed=merged > 0)
            rounded = back.double()
            lost = square_norm(rounded - exact) if form.format else None
            farthest = _farthest_element(stored, exact, rounded, item, packed=lost is not None)
            if form.blocks is not None:
                # A small change of a weight may double a scale that is a power of two.
                near = [
                    form.read_back(exact * by, stored.dtype, item.rows, changed=merged > 0).double()
                    for by in (1 - TOLERANCE, 1 + TOLERANCE)
                ]
                block = _farthest_block(stored, exact, [rounded, *near], item, form.blocks)
                farthest = max(farthest, block, key=_beyond)
            error = square_norm(stored.double() - rounded)
            total += _Distance(error, merged, square_norm(rounded), lost, farthest)
        return total

    found: list[_Tensor] = []
    for name, instead in chosen.items():
        if not instead:
            try:
                found.append(_Tensor(name, distance(name, by_reference), ""))
                continue
            except TensorError:
                instead = "its reference implementation fails"
        try:
            found.append(_Tensor(name, distance(name, registry.get), instead))
        except TensorError as error:
            raise CheckpointError(
                f"{output.source} cannot be computed again by the recipe in its covmerge.json: {error}"
            ) from error
    return found


def _farthest_element(
    stored: Tensor, exact: Tensor, rounded: Tensor, item: WorkItem, *, packed: bool
) -> _Farthest:
    """Return the element that is farthest from its exact value, less what storing it may change.

    Storing a number changes it by at most half the distance to the next number of the dtype. If each
    operation of the method rounds to a dtype (`arithmetic`), an operation may round the other way, which
    adds the whole distance in that dtype. In a quantised format the distance depends on the scale of the
    block, and the stored block may have another scale. There the allowance is twice the largest change
    from rounding the exact rows.
    """
    if not stored.numel():
        return _Farthest()
    off = (stored.double() - exact).abs()
    if packed:
        allowed = 2 * (rounded - exact).abs().max()
    else:
        allowed = _step(stored, stored.dtype) / 2
        merge = item.tensor.merge
        arithmetic = None if merge is None else merge.parameters.get("arithmetic")
        if arithmetic is not None:
            allowed += _step(stored, getattr(torch, arithmetic))
    beyond = off.sub_(allowed)
    largest, place = _largest(beyond, item)
    return _Farthest(largest, f"element {place}")


def _farthest_block(
    stored: Tensor, exact: Tensor, rounded: Sequence[Tensor], item: WorkItem, blocks: Blocks
) -> _Farthest:
    """Return the block with one scale that is farthest from its exact values, less what storing may change.

    `rounded` has the exact rows and rows near them, each as they are stored and read. Rounding changes a
    block by the most that it changes one of them, or by twice as much. The scale may be the next one of
    its dtype, unless it is a power of two, and reading the weights rounds once more.
    """

    def matrix(values: Tensor) -> Tensor:
        return values.flatten(1) if blocks.rows == 1 else values.flatten(0, -2)

    height, width = matrix(stored).shape
    high, wide = min(blocks.rows, height), min(blocks.columns, width)

    def norms(values: Tensor) -> Tensor:
        rows = matrix(values)
        missing = (0, -rows.shape[1] % wide, 0, -len(rows) % high)
        padded = pad(rows.square(), missing)
        grid = padded.view(len(padded) // high, high, padded.shape[1] // wide, wide)
        return grid.sum((1, 3)).sqrt_()

    eps, least = torch.finfo(stored.dtype).eps, 0.0
    if blocks.scales is not None:
        scales = torch.finfo(blocks.scales)
        eps += scales.eps
        # A scale below the dtype's normal numbers moves by its least number, times the integers.
        least = _INTEGERS * scales.tiny * scales.eps * sqrt(high * wide)
    most = torch.stack([norms(near - exact) for near in rounded]).amax(0)
    allowed = 2 * most + eps * norms(exact) + least
    largest, (row, column) = _largest(norms(stored.double() - exact) - allowed, item, (high, wide))
    if item.rows is not None:  # several rows of the matrix may be one of the tensor
        row += item.rows.start * (height // len(stored) - 1)
    return _Farthest(largest, f"the {high} x {wide} weights from {[row, column]} on")


def _largest(beyond: Tensor, item: WorkItem, sizes: Sequence[int] = ()) -> tuple[float, list[int]]:
    """Return the largest number and the place of its first weight; `sizes` are those of its block."""
    where = int(beyond.argmax())
    place = [int(axis) for axis in torch.unravel_index(torch.tensor(where), beyond.shape)]
    place = [axis * size for axis, size in zip(place, sizes or [1] * len(place), strict=True)]
    if place and item.rows is not None:
        place[0] += item.rows.start
    return max(0.0, float(beyond.flatten()[where])), place


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from each number to the next one of larger magnitude in a dtype."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)
    exponent = torch.frexp(size).exponent - 1
    return torch.ldexp(torch.full_like(size, info.eps), exponent)


def _unrounded(item: WorkItem) -> WorkItem:
    output = item.tensor.output
    header = TensorHeader(output.name, output.shape, torch.float64)
    unrounded = replace(item, tensor=replace(item.tensor, output=header, form=ModelTensor()))
    # A reference implementation has no tensor pass: it needs the whole tensor at once.
    return replace(unrounded, tensor_pass=False, at_once=None) if item.tensor_pass else unrounded
