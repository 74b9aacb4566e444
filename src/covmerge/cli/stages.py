"""The recipes of a file that come before the one that makes its output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from covmerge import api
from covmerge.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.checkpoints.staging import Staging
from covmerge.cli.console import say
from covmerge.engine import RunOptions
from covmerge.errors import InputError
from covmerge.recipe import Recipe, dump_recipe
from covmerge.recompute.sources import check_sources, sources_of


def merge_stages(stages: Sequence[tuple[Path, Recipe]], out: Path, options: RunOptions) -> None:
    """Merge each into its folder, which is an output like any other, and stays: `out` is made of it.

    With `resume` a stage that is finished is taken as it is, if its recipe and its sources are the same.

    Raises:
        InputError: anything wrong with the inputs, or with what lies at an output's place.
        CheckFailed: an output failed its verification.
        KeyboardInterrupt: with how to go on.
    """
    if not stages:
        return
    Staging(out, overwrite=options.overwrite).check()  # before any of the work
    for folder, recipe in stages:
        if options.resume and (folder / MANIFEST_NAME).exists():
            _check_same(folder, recipe)
            say("note", f"stage {folder.name} is finished: {folder}")
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = api.run_recipe(recipe, folder, options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run again with --resume") from None
        for kind, messages in (("warning", result.warnings), ("note", result.notes)):
            for message in messages:
                say(kind, f"stage {folder.name}: {message}")
        say("note", f"stage {folder.name} is merged: {folder}")


def _check_same(folder: Path, recipe: Recipe) -> None:
    manifest = read_manifest(folder)
    wanted = dump_recipe(recipe)
    differs = [key for key, value in wanted.items() if manifest["recipe"].get(key) != value]
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
