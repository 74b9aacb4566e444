"""Chat templates: a model's own, that of most models, or a format's. None is ever rendered here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.files.checkpoints.json_file import MAX_JSON_BYTES, parse_object
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import read_regular
from covmerge.plan.recipe.tokenizer import AUTO, BASE
from covmerge.plan.vocabulary.formats import FORMATS

TEMPLATE = "chat_template.jinja"
_IN_CONFIGS = ("tokenizer_config.json", "chat_template.json")
KEY = "chat_template"


def template_of(folder: Path | None) -> str | None:
    """Return the chat template of a model: of several the one that is called `default`.

    Raises:
        CheckpointError: a file of it cannot be read.
    """
    if folder is None:
        return None
    file = safe_child(folder, TEMPLATE)
    if file.is_file():
        try:
            text = read_regular(file, MAX_JSON_BYTES).decode("utf-8", errors="strict")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 ({error}): fetch it again") from error
        return text or None
    for name in _IN_CONFIGS:
        file = safe_child(folder, name)
        if file.is_file():
            given: Any = parse_object(read_regular(file, MAX_JSON_BYTES), str(file)).get(KEY)
            found = _default(given)
            if found:
                return found
    return None


def _default(given: object) -> str | None:
    """One template, or that which is called `default` of a list of them."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        for one in cast("list[object]", given):
            named = cast("dict[str, Any]", one) if isinstance(one, dict) else dict[str, Any]()
            if named.get("name") == "default" and isinstance(named.get("template"), str):
                return str(named["template"])
    return None


def chosen_template(
    wanted: str, folders: Mapping[str | None, Path | None]
) -> tuple[str | None, str]:
    """Return the chat template that a recipe asks for, and where it is from.

    Args:
        wanted: `auto`, `base`, an expert's name, a format's, or a template.
        folders: of the base, whose key is None, and of the experts, in their order.

    Raises:
        InputError: the model has none.
    """
    if "{" in wanted:
        return wanted, "the recipe"
    if wanted == AUTO:
        found = [own.strip() for own in map(template_of, folders.values()) if own]
        if not found:
            return None, "none of the models has one"
        (template, count), *_ = Counter(found).most_common(1)
        return template, f"{count} of {len(folders)} models"
    key = None if wanted == BASE else wanted
    if key in folders:
        template = template_of(folders[key])
        if template is None:
            raise InputError(
                f"chat_template is that of '{wanted}', which has none: name another model, a format, or "
                "write the template"
            )
        return template, f"'{wanted}'"
    return FORMATS[wanted], f"the format {wanted}"
