"""Statistics of the experts' data that a method needs, found for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote

from covmerge.base.errors import RecipeError, TensorError
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Role
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.open import HELD
from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.methods import Method, registry
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Recipe
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.plan.vocabulary.rows import Retokenized

Statistics = Mapping[str, StatisticsFile]

_KINDS = {"gram": "Gram matrix", "fisher": "Fisher information"}
_WITHOUT = "average (no {} of it)"


def check_statistics(
    recipe: Recipe, experts: Mapping[str, Checkpoint], statistics: Statistics
) -> None:
    """Check that every method of a recipe has the files that it needs, collected on these models."""
    for method in _methods_of(recipe):
        if method.data == "none":
            continue
        for expert in experts:
            if expert not in statistics:
                raise RecipeError(
                    f"method '{method.name}' needs the statistics of expert '{expert}': run "
                    f"{_how_to_collect(recipe, method, expert)}, then name the file by "
                    f"{Hint('statistics', {expert: 'FILE'})}."
                )
            file = statistics[expert]
            if not file.names(method.data):
                raise RecipeError(
                    f"{file.path} holds no {_KINDS[method.data]}, which method '{method.name}' needs: "
                    f"run {_how_to_collect(recipe, method, expert)}."
                )
    _check_protocols(statistics)
    for expert, checkpoint in experts.items():
        if expert in statistics:
            checkpoint.materialize()  # needed, as fine-tunes share headers
            # They were collected on the model with its own tokens, not the output's.
            own = checkpoint.original if isinstance(checkpoint, Retokenized) else checkpoint
            statistics[expert].check_model(f"expert '{expert}'", own)


def _check_protocols(statistics: Statistics) -> None:
    files = list(statistics.values())
    for file in files[1:]:
        if file.about.protocol != files[0].about.protocol:
            raise RecipeError(
                f"{files[0].path} was collected by the protocol '{files[0].about.protocol}', and "
                f"{file.path} by '{file.about.protocol}': collect all of them in one way."
            )


def _how_to_collect(recipe: Recipe, method: Method, expert: str) -> str:
    source = recipe.experts[expert].source
    saved = "FOLDER" if source in HELD else quote(source)  # what is in memory must be saved first
    return f"`covmerge collect {saved} DATA {expert}.covstats.safetensors --kind {method.data}`"


def _methods_of(recipe: Recipe) -> list[Method]:
    names = [recipe.method, *(rule.method for rule in recipe.rules if rule.method)]
    return [registry.get(name) for name in dict.fromkeys(names)]


def find_statistics(recipe: Recipe, tensor: TensorPlan, statistics: Statistics) -> TensorPlan:
    """Return a tensor's plan with the names of its statistics; if there are none, it is averaged."""
    merge = tensor.merge
    if merge is None:
        return tensor
    method = registry.get(merge.method)
    if method.data == "none":
        return tensor
    kind = method.data
    held = {expert: set(statistics[expert].names(kind)) for expert in tensor.operands}
    names = {expert: operand.tensor for expert, operand in tensor.operands.items()}
    found = {e: name for e, name in names.items() if name is not None and name in held[e]}
    if not found:
        average = Merge("average", {}, layout=None, scale=merge.scale)
        return replace(tensor, operation=average, rule=_WITHOUT.format(_KINDS[kind]))
    for expert, name in names.items():
        if expert not in found:
            raise TensorError(
                f"'{tensor.name}': {statistics[expert].path} of expert '{expert}' has no "
                f"{_KINDS[kind]} of '{name or tensor.name}', but the file of expert "
                f"'{next(iter(found))}' has one: collect it for all experts, or add "
                f"{rules_for(tensor.name, use='average')}."
            )
    for expert, name in found.items():
        _check(recipe, method, tensor, expert, statistics[expert], name)
    return replace(tensor, statistics=found)


def notes_on_missing_statistics(tensors: Sequence[TensorPlan]) -> Iterator[str]:
    """Yield a note on tensors that are averaged, because no expert has statistics of them."""
    for kind in _KINDS.values():
        names = [t.name for t in tensors if t.rule == _WITHOUT.format(kind)]
        if names:
            yield (
                f"{counted(len(names), 'tensor is', 'tensors are')} averaged, because the statistics have "
                f"no {kind} of {'it' if len(names) == 1 else 'them'} ({some(names, 2, quoted=True)})"
            )


def notes_on_unread_statistics(recipe: Recipe, statistics: Statistics) -> Iterator[str]:
    """Yield a note if experts have statistics that no method of the recipe uses."""
    measured = [e for e in recipe.experts if e in statistics]
    if measured and all(method.data == "none" for method in _methods_of(recipe)):
        users = ", ".join(
            method.name
            for method in registry
            if method.data != "none" and all(statistics[e].names(method.data) for e in measured)
        )
        yield (
            f"method '{recipe.method}' does not look at statistics of experts, and "
            f"{some(measured, 3, quoted=True)} {'has' if len(measured) == 1 else 'have'} some: leave them "
            "out" + (f", or name a method that does ({users})" if users else "")
        )


def _check(
    recipe: Recipe, method: Method, tensor: TensorPlan, expert: str, file: StatisticsFile, name: str
) -> None:
    kind = method.data
    if kind == "fisher":
        if recipe.tokenizer is not None and tensor.info.role in (Role.EMBEDDING, Role.OUTPUT):
            raise TensorError(
                f"'{tensor.name}': {file.path} has the Fisher information of the rows of expert "
                f"'{expert}', and `tokenizer` gives the output's rows to other tokens: average such "
                f"tables, by {Hint('tensors', {'embeddings': 'average', 'output_head': 'average'})}"
            )
        rows = tensor.operands[expert].rows  # a table may have fewer rows than the output's
        fitting = [tensor.stored.shape if rows is None else (rows, *tensor.stored.shape[1:])]
    else:
        assert tensor.merge is not None and tensor.merge.layout is not None
        shapes = matrix_shapes(tensor.stored.shape, tensor.merge.layout)
        fitting = [(d_in, d_in) for _, d_in in shapes]
    shape = file.header(kind, name).shape
    for wanted in fitting:
        if shape != wanted:
            raise TensorError(
                f"'{tensor.name}': {file.path} has statistics {list(shape)} of '{name}', this layer needs "
                f"{list(wanted)}: were they collected on another model, or is the tensor stored transposed "
                "(tensors: {conv1d: stored})?"
            )
        rows = file.rows(kind, name)
        if kind == "gram" and rows < wanted[0] and recipe.tensors.few_rows == "error":
            raise TensorError(
                f"'{tensor.name}': the Gram matrix of expert '{expert}' ({file.path}) comes from "
                f"{rows} layer inputs of {wanted[0]} dimensions, so it is singular. Collect more "
                f"examples, or allow it with {Hint('tensors', {'few_rows': 'allow'})}."
            )
