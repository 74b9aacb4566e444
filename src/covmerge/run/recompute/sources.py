"""The sources of a finished merge: opened as they were given, and only if they are the same."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.plan.recipe import Recipe
from covmerge.run.sources import OpenCheckpoints, open_recipe


@contextmanager
def sources_of(recipe: Recipe) -> Generator[OpenCheckpoints]:
    """Open base and experts as they were given to the merge."""
    given = [recipe.base, *(expert.source for expert in recipe.experts.values())]
    with ExitStack() as stack:
        try:
            checkpoints = stack.enter_context(open_recipe(recipe))
        except InputError as error:
            # A state dict has no place: "<state dict>".
            if all(s is None or s.startswith("<") or Path(s).is_absolute() for s in given):
                raise
            raise InputError(
                f"a source of the merge cannot be opened from {Path.cwd()}, and they are recorded as they "
                f"were given to it: run this in the folder of the merge. {error}"
            ) from error
        yield checkpoints


def pinned(recipe: Recipe, manifest: Mapping[str, Any]) -> Recipe:
    """The recipe with sources of the Hub at the commits that were merged."""

    def at(key: str, source: str) -> str:
        commit = manifest["sources"].get(key, {}).get("content", {}).get("revision")
        return source if commit is None else f"{source.partition('@')[0]}@{commit}"

    experts = {
        name: expert.model_copy(update={"source": at(f"expert {name}", expert.source)})
        for name, expert in recipe.experts.items()
    }
    base = None if recipe.base is None else at("base", recipe.base)
    return recipe.model_copy(update={"base": base, "experts": experts})


def check_sources(checkpoints: OpenCheckpoints, manifest: Mapping[str, Any]) -> None:
    """Refuse sources that are not those of the merge."""
    recorded: Mapping[str, Mapping[str, Any]] = manifest["sources"]
    now: dict[str, Json] = {key: fingerprint(one) for key, one in checkpoints.all()}
    now |= {f"statistics {n}": file.identity() for n, file in checkpoints.statistics.items()}
    decided = checkpoints.text.vocabulary
    if decided is not None and manifest.get("vocabulary") != decided.as_json():
        raise InputError(
            "the sources' tokenizers are not what they were when they were merged: put them back, or "
            f"verify without {Hint('deep')}"
        )
    for key, content in now.items():
        if recorded.get(key, {}).get("content") != content:
            raise InputError(
                f"{key} is not what was merged: its content has another hash than {MANIFEST_NAME} "
                f"records. Put the source back, or verify without {Hint('deep')}"
            )
