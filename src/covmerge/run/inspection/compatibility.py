"""Whether experts fit their base, as far as headers, configs and tokenizers tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.findings import Finding, Severity
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.files.checkpoints.json_file import read_object
from covmerge.plan.planning.align import Alignment, Model, align, check_same_architecture
from covmerge.plan.planning.rules import Rules
from covmerge.plan.recipe import Recipe

_TOKENIZER = "tokenizer.json"
# Files that hold a vocabulary, where there is no tokenizer.json.
_VOCABULARIES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_MAX_BYTES = 256 << 20


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


def check_tokenizers(base: Path | None, experts: Mapping[str, Path | None]) -> Iterator[Finding]:
    """Hold the experts' tokenizers against the base's, which the merged model will have."""
    if base is None:
        return
    own = _vocabulary(base)
    for name, folder in experts.items():
        other = None if folder is None else _vocabulary(folder)
        if own is None or other is None or own == other:
            continue
        yield Finding(Severity.WARNING, _tokens_that_differ(own, other), name)


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
    extra = [own for own, why in found.ignored.items() if why.startswith("extra")]
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
    own, other = base.checkpoint.config or {}, expert.checkpoint.config or {}
    key = "tie_word_embeddings"
    if None in (own.get(key), other.get(key)):
        return
    if own[key] != other[key] and base.checkpoint.untied is None:  # else a note says it
        yield Finding(
            Severity.WARNING,
            f"{key} is {other[key]} in its config.json and {own[key]} in the base's: the merged "
            "model has the base's",
            name,
        )


def _dtypes(base: Model, name: str, expert: Model, found: Alignment) -> Iterator[Finding]:
    others = {
        str(expert.dtype(theirs)).removeprefix("torch.")
        for own, theirs in found.names.items()
        if expert.dtype(theirs) != base.headers[own].dtype
    }
    if others:
        text = f"stores {', '.join(sorted(others))} where the base stores another dtype"
        yield Finding(Severity.NOTE, text, name)


def _vocabulary(folder: Path) -> dict[str, int] | str | None:
    """Token -> number, or a hash of the file that holds them; None where there is none."""
    path = folder / _TOKENIZER
    if path.is_file():
        try:
            return _tokens(read_object(path))
        except CheckpointError as error:
            return str(error)
    for name in _VOCABULARIES:
        path = folder / name
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    found: object = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, int] = {}
    if isinstance(found, dict):
        tokens.update(cast("dict[str, int]", found))
    elif isinstance(found, list):  # unigram: pairs of token and score
        for number, pair in enumerate(cast("list[Any]", found)):
            if isinstance(pair, list) and pair:
                tokens[str(cast("list[Any]", pair)[0])] = number
    added: object = tokenizer.get("added_tokens")
    if isinstance(added, list):
        for entry in cast("list[Any]", added):
            if isinstance(entry, dict):
                token = cast("dict[str, Any]", entry)
                tokens[str(token.get("content"))] = token.get("id", -1)
    return tokens


def _tokens_that_differ(own: dict[str, int] | str, other: dict[str, int] | str) -> str:
    if isinstance(own, str) or isinstance(other, str):
        return (
            "its tokenizer is another file than the base's: check that both mean the same tokens; "
            "the merged model has the base's"
        )
    moved = [token for token in own if token in other and own[token] != other[token]]
    added = [token for token in other if token not in own]
    gone = [token for token in own if token not in other]
    parts = [
        f"{len(tokens)} tokens {what} (such as {tokens[0]!r:.40})"
        for what, tokens in (("added", added), ("missing", gone), ("with another number", moved))
        if tokens
    ]
    return (
        f"its tokenizer differs from the base's: {', '.join(parts)}. The merged model has the base's: "
        "what the expert learnt of the others is lost"
    )
