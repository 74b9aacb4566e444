"""The recipes of a file that come before the one that makes its output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.staging import Staging, check_not_input
from covmerge.files.stores.address import local_path
from covmerge.files.stores.disk import disk_errors
from covmerge.files.stores.local import LocalFolder
from covmerge.front import api
from covmerge.front.cli.console import say
from covmerge.plan.recipe import Recipe, differing, dump_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.recompute.sources import check_sources, sources_of
from covmerge.run.sources import statistics_of
from covmerge.run.verification.files import check_files, hash_files


def merge_stages(recipes: Sequence[tuple[Path, Recipe]], options: RunOptions) -> None:
    """Merge all but the last, each into its folder, which is an output like any other, and stays.

    With `resume` a stage that is finished is taken as it is, if it is as it was written, and its recipe
    and its sources are the same.

    Raises:
        InputError: anything wrong with the inputs, or with what lies at an output's place.
        CheckFailed: an output failed its verification.
        KeyboardInterrupt: with how to go on.
    """
    *stages, _ = recipes
    if not stages:
        return
    if options.rank is not None:
        raise InputError(
            "ranks share one merge, and this file has several stages: leave out --executor ranks, or merge "
            "one stage after the other"
        )
    _check_places(recipes, options)  # before any of the work
    _check_sources(recipes)
    for folder, recipe in stages:
        if _is_taken(folder, options):
            _check_same(folder, recipe)
            say("note", f"stage {folder.name} is finished: {folder}")
            continue
        with disk_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = api.run_recipe(recipe, folder, options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run again with --resume") from None
        for kind, messages in (("warning", result.warnings), ("note", result.notes)):
            for message in messages:
                say(kind, f"stage {folder.name}: {message}")
        say("note", f"stage {folder.name} is merged: {folder}")


def _check_places(recipes: Sequence[tuple[Path, Recipe]], options: RunOptions) -> None:
    """Refuse outputs that may not be made, or that are inputs of any of the recipes."""
    made: set[str] = set()
    given: list[Path] = []
    for folder, recipe in recipes:
        given += _places(source for source in _sources(recipe) if source not in made)
        made.add(str(folder))
    for number, (folder, _) in enumerate(recipes, 1):
        check_not_input(folder, given)
        if number == len(recipes) or not _is_taken(folder, options):
            Staging(folder, overwrite=options.overwrite).check()


def _check_sources(recipes: Sequence[tuple[Path, Recipe]]) -> None:
    """Open what later recipes read of models that are there already, as their own merges will.

    Raises:
        CheckpointError: one is not there, or cannot be read.
    """
    made = {str(folder) for folder, _ in recipes}
    for _, recipe in recipes[1:]:
        for source in dict.fromkeys(_models(recipe)):
            if source not in made:
                open_checkpoint(source).close()


def _is_taken(folder: Path, options: RunOptions) -> bool:
    """Whether a stage is finished already, and gone on from."""
    return options.resume and (folder / MANIFEST_NAME).exists()


def _sources(recipe: Recipe) -> list[str]:
    """What a recipe reads, as it names it."""
    return [*_models(recipe), *statistics_of(recipe).values()]


def _models(recipe: Recipe) -> list[str]:
    """The models that a recipe reads."""
    experts = [expert.source for expert in recipe.experts.values()]
    return [*(() if recipe.base is None else (recipe.base,)), *experts]


def _places(sources: Iterable[str]) -> Iterator[Path]:
    """Those that lie here; what cannot be a path is left to its reader to refuse."""
    for source in sources:
        with suppress(OSError, RuntimeError, ValueError):
            if (path := local_path(source).expanduser()).exists():
                yield path


def _check_same(folder: Path, recipe: Recipe) -> None:
    manifest = read_manifest(folder)
    store = LocalFolder(folder)
    files = check_files(store, manifest, hash_files(store, manifest.get("files", ())))
    if not (files.ok and files.made):
        raise InputError(
            f"{folder} is a finished stage that is not as it was written: {files.detail}. --overwrite "
            "merges it anew"
        )
    wanted = dump_recipe(recipe)
    settled = {"method"} - wanted.keys()  # by the merge, where nothing was said
    differs = [key for key in differing(manifest["recipe"], wanted) if key not in settled]
    if differs:
        raise InputError(
            f"{folder} is a finished stage of another recipe ({', '.join(differs)}): --overwrite "
            "merges it anew"
        )
    with sources_of(recipe) as checkpoints:
        try:
            check_sources(checkpoints, manifest)
        except InputError as error:
            raise InputError(
                f"{folder} is a finished stage of other sources: --overwrite merges it anew ({error})"
            ) from error
