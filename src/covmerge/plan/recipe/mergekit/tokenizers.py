"""mergekit's tokenizers and chat templates, as rules of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.models import Reference, reference
from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.sections import AUTO, BASE, TEMPLATES, UNION, ZERO
from covmerge.plan.recipe.strict_yaml import unquoted

KEYS = ("tokenizer_source", "tokenizer", "chat_template")
# Names that a model cannot have where they mean something else.
RESERVED = (AUTO, BASE, UNION, ZERO, *TEMPLATES)


@dataclass(frozen=True)
class Named:
    """What our recipe calls the models of theirs.

    Attributes:
        models: those that are merged, with their names.
        base: the base of ours.
    """

    models: Mapping[Reference, str]
    base: Reference | None

    def called(self, model: Reference) -> str | None:
        """The name of a model, whose tokens an adapter of it has; None: it is not merged."""
        if self.base is not None and model.model == self.base.model:
            return BASE
        return self.models.get(model)

    @property
    def first(self) -> str:
        """The name of their base; of the first model where there is none."""
        return self.called(self.base or next(iter(self.models))) or BASE


def asks_for_tokens(part: Part) -> bool:
    """Whether a recipe has any of these keys."""
    return any(part.data.get(key) is not None for key in KEYS)


def tokens_of(part: Part, named: Named) -> dict[str, Any]:
    """Return `tokenizer` and `chat_template` of our recipe, as far as theirs has them."""
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
        if not isinstance(template, str) or not _is_template(template):
            part.refuse(
                f"chat_template is {shown(template)}; it is {AUTO}, one of {', '.join(TEMPLATES)}, or "
                "Jinja",
                "chat_template",
            )
        found["chat_template"] = template
    return found


def _is_template(text: str) -> bool:
    return text in (AUTO, *TEMPLATES) or (len(text) >= 20 and "{" in text)


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
    """Whose row a token gets."""
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
