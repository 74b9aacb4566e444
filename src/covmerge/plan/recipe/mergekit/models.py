"""mergekit's references to models, and names for the models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from covmerge.base.identifiers import EXPERT_NAME_LENGTH
from covmerge.base.text import shown
from covmerge.files.stores.address import address_of
from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.sections import AUTO, BASE, TEMPLATES, UNION, ZERO
from covmerge.plan.recipe.strict_yaml import unquoted

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Reference:
    """A model, with an adapter of it or without one; each is a path, or org/name@revision."""

    model: str
    lora: str | None = None

    def __str__(self) -> str:
        return self.model if self.lora is None else f"{self.model}+{self.lora}"


def reference(part: Part, key: str) -> Reference:
    """Return the model under a key, given as text or as a mapping."""
    found = _reference(part, key)
    for path in filter(None, (found.model, found.lora)):
        address_of(path)  # raises for what may contain a secret: recipes are printed and stored
    return found


def _reference(part: Part, key: str) -> Reference:
    value = part.data.get(key)
    if isinstance(value, str) and value:
        return _of_text(part, key, value)
    if not isinstance(value, Mapping):
        part.refuse(
            f"`{key}` is {shown(value)}; it is a path, org/name@revision, model+adapter, or a mapping with "
            "`model` and `lora`",
            key,
        )
    inner = part.part(key)
    inner.check_keys(("model", "lora", "override_architecture"))
    if "override_architecture" in inner.data:
        inner.log.notes.append(
            f"override_architecture of {shown(inner.data.get('model'))} is of no meaning: covmerge goes by "
            "the names of the tensors"
        )
    lora = None if inner.data.get("lora") is None else _path(inner, "lora")
    return Reference(_path(inner, "model"), lora)


def names_of(references: Iterable[Reference], others: Iterable[str] = ()) -> dict[Reference, str]:
    """Return a name for each model: the last part of its path, with a number if that name is taken.

    Example:
        >>> list(names_of([Reference("a/x@v1"), Reference("b/x"), Reference("m", "./lora")]).values())
        ['x', 'x-2', 'lora']
    """
    found: dict[Reference, str] = {}
    taken = set(others)
    for ref in dict.fromkeys(references):
        path = (ref.lora or ref.model).partition("@")[0].rstrip("/")
        stem = _UNFIT.sub("-", path.rpartition("/")[2]).strip("-.") or "model"
        stem = stem[: EXPERT_NAME_LENGTH - 5]
        name, number = stem, 2
        while name.lower() in taken:
            name, number = f"{stem}-{number}", number + 1
        taken.add(name.lower())
        found[ref] = name
    return found


@dataclass(frozen=True)
class Places:
    """The places where models are searched.

    Attributes:
        beside: the recipe's folder, for paths missing in the working directory; None: no folder.
        stages: the outputs of the file's other recipes, by their names.
    """

    beside: Path | None = None
    stages: Mapping[str, str] = field(default_factory=dict[str, str])

    def located(self, source: str) -> str:
        """Return a source for covmerge: a stage, or an existing path, which is not looked up on the Hub.

        Paths are looked for in the working directory, as mergekit does, and then beside the recipe.
        """
        if source in self.stages:
            return self.stages[source]
        for folder in (Path(), *(() if self.beside is None else (self.beside,))):
            path = _existing(source, folder)
            if path is not None:
                outside = path.is_absolute() or path.parts[:1] == ("..",)
                return str(path) if outside else f"./{path}"
        return source


def _of_text(part: Part, key: str, text: str) -> Reference:
    model, *lora = text.split("+")
    if not lora or _existing(text, Path()) is not None:
        return Reference(text)
    if len(lora) > 1 or not model or not lora[0]:
        part.refuse(f"`{key}` is {text!r}; it is a model, or model+adapter", key)
    return Reference(model, lora[0])


def _existing(text: str, folder: Path) -> Path | None:
    with suppress(OSError, RuntimeError, ValueError):  # too long, an unknown home folder, a NUL
        path = folder / Path(text).expanduser()
        if path.exists():
            return path
    return None


def _path(part: Part, key: str) -> str:
    value = part.data.get(key)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, Mapping):
        part.refuse(f"`{key}` is {shown(value)}; it is a path, or org/name@revision", key)
    inner = part.part(key)
    inner.check_keys(("path", "revision"))
    path, revision = inner.data.get("path"), cast("Any", inner.data.get("revision"))
    if not isinstance(path, str) or not path or not (revision is None or isinstance(revision, str)):
        inner.refuse(f"{shown(dict(inner.data))} is not {{path: PATH, revision: REVISION}}")
    return path if revision is None else f"{path}@{revision}"


# mergekit's tokenizers and chat templates as covmerge's rules.

KEYS = ("tokenizer_source", "tokenizer", "chat_template")
# Names that no model may have where they have another meaning.
RESERVED = (AUTO, BASE, UNION, ZERO, *TEMPLATES)


@dataclass(frozen=True)
class Named:
    """The names that covmerge's recipe gives to a mergekit recipe's models."""

    models: Mapping[Reference, str]
    base: Reference | None

    def called(self, model: Reference) -> str | None:
        """Return the name of a model, or of an adapter's model for its tokens; None: it is not merged."""
        if self.base is not None and model.model == self.base.model:
            return BASE
        return self.models.get(model)

    @property
    def first(self) -> str:
        """The name of mergekit's base, or of the first model if there is no base."""
        return self.called(self.base or next(iter(self.models))) or BASE


def tokens_of(part: Part, named: Named) -> dict[str, Any]:
    """Return `tokenizer` and `chat_template` for covmerge's recipe, if mergekit's recipe has them."""
    found: dict[str, Any] = {}
    if part.data.get("tokenizer") is not None:
        if part.data.get("tokenizer_source") is not None:
            part.refuse(
                "`tokenizer` and `tokenizer_source` both name a tokenizer; remove one of them"
            )
        found["tokenizer"] = _rules(part.part("tokenizer"), named)
    elif part.data.get("tokenizer_source") is not None:
        found["tokenizer"] = {"source": _source(part, "tokenizer_source", named)}
    template: object = part.data.get("chat_template")
    if template is not None:
        jinja = isinstance(template, str) and len(template) >= 20 and "{" in template
        if not jinja and template not in (AUTO, *TEMPLATES):
            part.refuse(
                f"chat_template is {shown(template)}; it is {AUTO}, one of {', '.join(TEMPLATES)}, or "
                "Jinja",
                "chat_template",
            )
        found["chat_template"] = template
    return found


def _rules(part: Part, named: Named) -> dict[str, Any]:
    part.check_keys(("source", "tokens", "pad_to_multiple_of"))
    source = UNION if part.data.get("source") is None else _source(part, "source", named)
    found: dict[str, Any] = {"source": source}
    tokens = part.part("tokens")
    if tokens.data:
        found["tokens"] = {token: _row(tokens.part(token), named) for token in tokens.data}
    multiple = unquoted(part.data.get("pad_to_multiple_of"))
    if multiple:
        if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
            part.refuse(
                f"pad_to_multiple_of is {shown(multiple)}; it is a number of rows",
                "pad_to_multiple_of",
            )
        found["pad_to_multiple_of"] = multiple
    return found


def _source(part: Part, key: str, named: Named) -> str:
    given: object = part.data[key]
    if given in (UNION, BASE):
        return UNION if given == UNION else named.first
    return _model(part, key, named)


def _model(part: Part, key: str, named: Named) -> str:
    model = reference(part, key)
    found = named.called(model)
    if found is None:
        part.refuse(
            f"`{key}` is {model}, which is none of the models that are merged: name one", key
        )
    return found


def _row(part: Part, named: Named) -> dict[str, Any]:
    part.check_keys(("source", "force"))
    force = {"force": True} if part.data.get("force") else {}
    given: object = part.data.get("source")
    if given is None:
        part.refuse("no `source` says whose row the token gets: name a model, or remove the token")
    if not isinstance(given, Mapping) or "kind" not in given:
        return {"of": _model(part, "source", named), **force}
    source = part.part("source")
    kind: object = source.data["kind"]
    if kind == "zero":
        source.check_keys(("kind",))
        return {"of": ZERO, **force}
    if kind != "model_token":
        source.refuse(f"kind is {shown(kind)}; it is zero or model_token", "kind")
    source.check_keys(("kind", "model", "token", "token_id"))
    asked = {
        ours: source.data[theirs]
        for theirs, ours in (("token", "token"), ("token_id", "id"))
        if source.data.get(theirs) is not None
    }
    if len(asked) != 1:
        source.refuse("exactly one of `token` and `token_id` is needed")
    return {"of": _model(source, "model", named), **asked, **force}
