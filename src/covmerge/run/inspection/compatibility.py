"""Whether experts fit their base, as far as headers and configs tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from covmerge.base.errors import InputError
from covmerge.base.findings import Finding, Severity
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.plan.planning.align import Alignment, Model, align, check_same_architecture
from covmerge.plan.planning.rules import Rules
from covmerge.plan.recipe import Recipe


def lenient(recipe: Recipe) -> Recipe:
    """Return a recipe that merges by no method in particular and lets pass what it can.

    Which tensors are left to the base or kept as heads stays as it is.
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
    """Hold headers and configs against the base's.

    Returns:
        What was found, and the experts whose tensors can be compared with the base's.
    """
    rules = Rules(lenient(recipe), base.description.family, base.headers)
    notes = (*base.description.notes, *base.checkpoint.notes)
    findings = [Finding(Severity.NOTE, note) for note in notes]
    fitting: list[str] = []
    for name, model in experts.items():
        try:
            check_same_architecture(base, name, model)
            found = align(base, name, model, lenient(recipe).tensors, rules.chosen_use)
        except InputError as error:
            findings.append(Finding(Severity.FAULT, str(error), name))
            continue
        fitting.append(name)
        findings += _alignment(recipe, base, name, found)
        findings += _configs(base, name, model)
        findings += [Finding(Severity.NOTE, note, name) for note in model.checkpoint.notes]
        findings += _dtypes(base, name, model, found)
    return findings, fitting


def _alignment(recipe: Recipe, base: Model, name: str, found: Alignment) -> Iterator[Finding]:
    tensors = recipe.tensors
    if found.missing:
        refused = tensors.missing == "error"
        yield Finding(
            Severity.FAULT if refused else Severity.WARNING,
            f"lacks {len(found.missing)} of the base's tensors ({some(found.missing, 3)})"
            + (
                f": choose what that means by {Hint('tensors', {'missing': 'base'})}, or `present`"
                if refused
                else ""
            ),
            name,
            tuple(found.missing),
        )
    extra = [name for name, why in found.ignored.items() if why.startswith("extra")]
    if extra:
        refused = tensors.extra == "error"
        yield Finding(
            Severity.FAULT if refused else Severity.WARNING,
            f"has {counted(len(extra), 'tensor')} that the base lacks ({some(extra, 3)})"
            + (f": leave them out by {Hint('tensors', {'extra': 'ignore'})}" if refused else ""),
            name,
        )
    for tensor, rows in found.resized.items():
        refused = tensors.vocabulary == "error"
        yield Finding(
            Severity.FAULT if refused else Severity.WARNING,
            f"its vocabulary was resized: '{tensor}' has {rows} rows, the base "
            f"{base.headers[tensor].shape[0]}"
            + (
                "; if the first rows mean the same tokens, merge the base's by "
                f"{Hint('tensors', {'vocabulary': 'base'})}"
                if refused
                else "; the rows of the base are merged"
            )
            + _rows_besides(rows - base.headers[tensor].shape[0]),
            name,
            (tensor,),
        )
    if found.heads:
        yield Finding(
            Severity.NOTE, f"has a task head of its own ({some(found.heads, 3)}), kept beside", name
        )


def _rows_besides(added: int) -> str:
    """Say that what is counted of a table leaves out the rows that only the expert has."""
    return f". Its {counted(added, 'row')} beyond are not counted below" if added > 0 else ""


def _configs(base: Model, name: str, expert: Model) -> Iterator[Finding]:
    config, other = base.checkpoint.config or {}, expert.checkpoint.config or {}
    key = "tie_word_embeddings"
    if None in (config.get(key), other.get(key)):
        return
    if config[key] != other[key] and base.checkpoint.untied is None:  # else a note says it
        yield Finding(
            Severity.WARNING,
            f"{key} is {other[key]} in its config.json and {config[key]} in the base's: the merged "
            "model has the base's",
            name,
        )


def _dtypes(base: Model, name: str, expert: Model, found: Alignment) -> Iterator[Finding]:
    others = {
        str(expert.dtype(theirs)).removeprefix("torch.")
        for name, theirs in found.names.items()
        if expert.dtype(theirs) != base.headers[name].dtype
    }
    if others:
        text = f"stores {', '.join(sorted(others))} where the base stores another dtype"
        yield Finding(Severity.NOTE, text, name)
