"""Findings that only an inspection makes, from headers, configs and measurements of the updates.

Findings that a merge makes too are in `covmerge.run.judgement`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations
from math import sqrt
from operator import add

from covmerge.base.errors import InputError
from covmerge.base.findings import Finding, Severity
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some, spread
from covmerge.files.tensors.describe import has_own_head
from covmerge.plan.planning.align import Alignment, align, check_same_architecture
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.notes import other_dtypes
from covmerge.plan.planning.rules import Rules
from covmerge.plan.recipe import Recipe
from covmerge.plan.vocabulary.rows import rows_of
from covmerge.run.inspection.result import LayerView, lost_when_stored

# Findings from headers and configs: do the experts fit their base?


def lenient(recipe: Recipe) -> Recipe:
    """Return the recipe with averaging for every method, and with as few refusals as possible.

    Rules that leave tensors to the base or keep them as heads stay as they are.
    """
    rules = tuple(
        rule
        if rule.method is None
        else rule.model_copy(update={"method": None, "parameters": {}, "use": "method"})
        for rule in recipe.rules
    )
    tensors = recipe.tensors.model_copy(
        update={"missing": "base", "extra": "ignore", "vocabulary": "base"}
    )
    return recipe.model_copy(
        update={
            "method": "average",
            "parameters": {},
            "rules": rules,
            "tensors": tensors,
            "output": recipe.output.model_copy(update={"format": "model"}),
        }
    )


def check_headers(
    recipe: Recipe, base: Model, experts: Mapping[str, Model]
) -> tuple[list[Finding], list[str]]:
    """Compare the experts' headers and configs with the base's.

    Return the findings, and the names of the experts whose tensors can be compared with the base's.
    """
    rules = Rules(lenient(recipe), base.description.family, base.headers)
    notes = (*base.description.notes, *base.checkpoint.notes)
    findings = [Finding(Severity.NOTE, note) for note in notes]
    fitting: list[str] = []
    for name, model in experts.items():
        try:
            check_same_architecture(base, model)
            found = align(base, model, lenient(recipe).tensors, rules.chosen_use)
        except InputError as error:
            findings.append(Finding(Severity.FAULT, str(error), name))
            continue
        fitting.append(name)
        findings += _alignment(recipe, base, name, found)
        findings += _configs(base, name, model)
        findings += [Finding(Severity.NOTE, note, name) for note in model.checkpoint.notes]
        if dtypes := other_dtypes(base, model, found):
            findings.append(Finding(Severity.NOTE, dtypes, name))
    return findings, fitting


def _alignment(recipe: Recipe, base: Model, name: str, found: Alignment) -> Iterator[Finding]:
    tensors = recipe.tensors
    if found.missing:
        text = f"lacks {len(found.missing)} of the base's tensors ({some(found.missing, 3)})"
        advice = f": choose what that means by {Hint('tensors', {'missing': 'base'})}, or `present`"
        yield _refused(tensors.missing, text, advice, "", name, tuple(found.missing))
    extra = [name for name, why in found.ignored.items() if why.startswith("extra")]
    if extra:
        text = f"has {counted(len(extra), 'tensor')} that the base lacks ({some(extra, 3)})"
        advice = f": leave them out by {Hint('tensors', {'extra': 'ignore'})}"
        yield _refused(tensors.extra, text, advice, "", name)
    for tensor, rows in found.resized.items():
        kind, own = rows_of(tensor), base.headers[tensor].shape[0]
        beyond = f". Its {counted(rows - own, 'row')} beyond are not counted below"
        beyond = beyond if rows > own else ""
        advice = (
            f"; if the first rows mean the same {kind}, merge the base's by "
            f"{Hint('tensors', {'vocabulary': 'base'})}{beyond}"
        )
        merged = f"; the rows of the base are merged{beyond}"
        text = f"its {_RESIZED[kind]}: '{tensor}' has {rows} rows, the base {own}"
        yield _refused(tensors.vocabulary, text, advice, merged, name, (tensor,))
    if found.heads:
        yield Finding(
            Severity.NOTE, f"has a task head of its own ({some(found.heads, 3)}), kept beside", name
        )


_RESIZED = {
    "tokens": "vocabulary was resized",
    "places": "number of places differs",
    "types": "number of types differs",
}


def _refused(
    setting: str, text: str, advice: str, other: str, name: str, tensors: tuple[str, ...] = ()
) -> Finding:
    """Return a fault with advice if the setting is "error", else a warning that ends otherwise."""
    if setting == "error":
        return Finding(Severity.FAULT, text + advice, name, tensors)
    return Finding(Severity.WARNING, text + other, name, tensors)


def _configs(base: Model, name: str, expert: Model) -> Iterator[Finding]:
    config, other = base.checkpoint.config or {}, expert.checkpoint.config or {}
    key = "tie_word_embeddings"
    if None in (config.get(key), other.get(key)):
        return
    alike = has_own_head(config) == has_own_head(other)
    if not alike and base.checkpoint.untied is None:  # otherwise a note says so
        yield Finding(
            Severity.WARNING,
            f"{key} is {other[key]} in its config.json and {config[key]} in the base's: the merged "
            "model has the base's",
            name,
        )


TWINS = 0.98  # cosine between two updates above which they are one expert given twice
OPPOSED = -0.2  # cosine between two updates below which they pull against each other
THIN = 8  # a numerical rank below 1/8 of the full one is a low-rank update
LOST = 0.1  # share of an update lost to half precision above which a finding reports it


def findings_of(
    layers: Sequence[LayerView],
    experts: Sequence[str],
    adapters: Collection[str],
    *,
    half: bool,
) -> Iterator[Finding]:
    """Yield the findings that follow from the sums and spectra of the layers."""
    matrices = [layer for layer in layers if layer.is_matrix]
    for expert in experts:
        if expert not in adapters:
            yield from _thin(matrices, expert)
        yield from _read(layers, expert)
    yield from _pairs(layers, experts)
    yield from _rounding(layers, experts, half)
    yield from _rounded(layers)


def _thin(matrices: Sequence[LayerView], expert: str) -> Iterator[Finding]:
    layers = [layer for layer in matrices if layer.norms[expert] and expert in layer.spectra]
    ranks = [layer.spectra[expert].rank for layer in layers]
    thin = [r for r, layer in zip(ranks, layers, strict=True) if THIN * r <= min(layer.shape)]
    if layers and len(thin) >= 0.9 * len(layers):
        yield Finding(
            Severity.NOTE,
            f"its updates have a low rank ({spread(ranks)} of "
            f"{min(min(layer.shape) for layer in layers)}), as where an adapter was merged into a model; "
            f"such experts are merged exactly on their factors ({Hint('form', 'adapter')})",
            expert,
        )


def _read(layers: Sequence[LayerView], expert: str) -> Iterator[Finding]:
    """Say what an expert's embeddings reveal about its training texts (docs/privacy.md)."""
    for layer in layers:
        moved = layer.rows.get(expert)
        if moved is None or not moved.turned:
            continue
        of = f"of {moved.rows} rows of '{layer.tensor}'"
        decayed = moved.changed > moved.turned
        besides = (
            " by more than weight decay and rounding would (all in all "
            f"{moved.changed} differ from the base's)"
        )
        how = besides if decayed else ""
        kind = rows_of(layer.tensor)
        if kind == "tokens" and moved.turned < moved.rows:
            text = (
                f"changed {moved.turned} {of}{how}: these are tokens of the texts that it was trained on, "
                "and whoever has it and its base can list them (docs/privacy.md)"
            )
        elif kind == "tokens":
            text = (
                f"changed all {moved.rows} rows of '{layer.tensor}', so that this alone does not tell "
                "which tokens its texts had; by how much may (docs/privacy.md)"
            )
        elif kind == "places" and moved.last < moved.rows:
            text = (
                f"changed {moved.turned} {of}{how}, the last of them number {moved.last}: its longest text "
                "had about as many tokens (docs/privacy.md)"
            )
        else:
            continue
        yield Finding(Severity.NOTE, text, expert, (layer.tensor,))


def _pairs(layers: Sequence[LayerView], experts: Sequence[str]) -> Iterator[Finding]:
    if len(experts) < 2:
        return
    total = reduce(add, (layer.sums for layer in layers))
    for i, j in combinations(range(len(experts)), 2):
        cosine, pair = total.cosines[i][j], f"'{experts[i]}' and '{experts[j]}'"
        if cosine > TWINS:
            yield Finding(
                Severity.WARNING,
                f"{pair} changed the base alike (cosine {cosine:.3f}): one expert given twice?",
            )
        if cosine < OPPOSED:
            yield Finding(Severity.WARNING, f"{pair} pull against each other (cosine {cosine:.2f})")


def _rounding(layers: Sequence[LayerView], experts: Sequence[str], half: bool) -> Iterator[Finding]:
    squares: Mapping[str, list[float]] = {expert: [0.0, 0.0] for expert in experts}
    for layer in layers:
        for expert, lost in zip(experts, layer.sums.rounding_of_weights, strict=False):
            squares[expert][0] += (lost * layer.norms[expert]) ** 2
            squares[expert][1] += layer.norms[expert] ** 2
    for expert, (lost, whole) in squares.items():
        if whole and lost > LOST**2 * whole:
            share, severity = f"{sqrt(lost / whole):.0%}", Severity.NOTE
            text = f"storing the base with its update in bfloat16 would lose {share} of the update"
            if half:
                severity = Severity.WARNING
                text += (
                    f": merge to float32 ({Hint('out_dtype', 'float32')}), or keep it as an adapter"
                )
            yield Finding(severity, text, expert)


def _rounded(layers: Sequence[LayerView]) -> Iterator[Finding]:
    for expert, lost in lost_when_stored(layers).items():
        if lost > LOST:
            yield Finding(
                Severity.NOTE,
                f"is stored in half precision, which took about {lost:.0%} of the length of its update: "
                "where a weight was moved by less than half its last place, it is the base's once more. If "
                "the expert exists in float32, or as an adapter, merge that",
                expert,
            )
