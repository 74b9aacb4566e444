"""The work of `covmerge merge` for a recipe: a dry run, or the merge and its report."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from covmerge.base.errors import InputError
from covmerge.base.sizes import format_size
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.staging import (
    Staging,
    check_not_input,
    destination_of,
    remove_remains,
)
from covmerge.files.stores.address import address_of, local_path
from covmerge.files.stores.disk import disk_errors
from covmerge.files.stores.local import LocalFolder
from covmerge.front import api
from covmerge.front.cli.console import print_json, printable, say, say_all, stderr, stdout
from covmerge.front.cli.machine import measure_speed
from covmerge.front.cli.progress import BytesProgress
from covmerge.front.cli.show import plan_summary, show_plan, show_result
from covmerge.front.reporting.job import FILE_NAME, ReportJob, check_packages, write_html
from covmerge.plan.recipe import Recipe, differing, dump_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import room_for
from covmerge.run.recompute import check_sources, sources_of
from covmerge.run.result import MergeResult
from covmerge.run.sources import open_recipe, statistics_of
from covmerge.run.together import Together
from covmerge.run.verification.files import check_files, hash_files

# Largest share of a merge's FLOPs that the spectra of its report may take. A decomposition takes
# five to ten times as long as matrix products of as many FLOPs.
_SPECTRAL_SHARE = 0.2


def dry_run(recipe: Recipe, out: Path | None, options: RunOptions, *, as_json: bool) -> None:
    """Print the plan of a merge; errors about the output folder and the disk's room come after it."""
    with open_recipe(recipe) as opened:
        plan, checkpoints = opened.plan(recipe)
        memory = options.memory([plan])
        # This measures this machine; the device of other machines may not exist here.
        device = options.device if options.cluster is None else "cpu"
        speed = measure_speed(recipe, plan, checkpoints.sources(), device, options.threads)
    room = None if out is None else room_for([plan], destination_of(out).work.folder)
    if as_json:
        print_json(plan_summary(plan, memory, speed, room))
    else:
        show_plan(stdout(), plan, memory, speed, room)
    if out is not None:
        Staging(out, overwrite=options.overwrite, resume=options.resume).foresee()
    # The space that an earlier output takes may become free for this merge.
    if room is not None and not (options.resume or options.overwrite):
        room.check()


def check_report(recipe: Recipe, out: Path) -> None:
    """Raise an error, before the merge, if no report on it can be made."""
    check_packages()
    local_path(out)
    if recipe.base is None:
        raise InputError("--report shows updates of a base, and the recipe has none: leave it out")


def merge_to(
    recipe: Recipe,
    out: Path,
    options: RunOptions,
    *,
    report: bool = False,
    verbose: bool = False,
    as_json: bool,
) -> None:
    """Merge, and print the result."""
    start = time.perf_counter()
    result = _merged(recipe, out, options)
    if result.verification is None:  # another rank has published it
        _say_published(result, out, as_json=as_json)
        return
    run: dict[str, Any] = {
        **result.run,
        "wall_seconds": time.perf_counter() - start,
        "threads": options.threads or torch.get_num_threads(),
        "device": str(options.torch_device),
    }
    if not as_json:
        show_result(stdout(), result, run, verbose=verbose)
    page = _write_page(result, out, options) if report else None
    if as_json:
        print_json({**_summary(result, run), **({} if page is None else {"report": str(page)})})
    elif page is not None:
        stdout().print(printable(f"\nReport: {page}"), soft_wrap=True)
    _warn_of_memory(run["peak_memory"], options.max_memory)


def _merged(recipe: Recipe, out: Path, options: RunOptions) -> MergeResult:
    try:
        return api.run_recipe(recipe, out, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run again with --resume") from None


def _say_published(result: MergeResult, out: Path, *, as_json: bool) -> None:
    place = str(address_of(out) or out)
    if as_json:
        print_json({"path": place, "run": dict(result.run), "notes": list(result.notes)})
    else:
        stdout().print(printable(f"{place}: {'; '.join(result.notes)}"), soft_wrap=True)


def _write_page(result: MergeResult, out: Path, options: RunOptions) -> Path:
    job = ReportJob(
        out,
        options=replace(options, progress=BytesProgress(stderr(), label="report: ")),
        seconds=result.seconds,
        measured=result.run,
        verification=result.verification,
        share=_SPECTRAL_SHARE,
    )
    write_html(job.run(), out / FILE_NAME)
    return out / FILE_NAME


def _summary(result: MergeResult, run: dict[str, Any]) -> dict[str, Any]:
    report = result.verification
    return {
        "path": str(result.path or (report and report.folder)),
        "method": result.recipe.method,
        "run": run,
        "totals": result.stats["totals"],
        "heads": result.stats["heads"],
        "warnings": list(result.warnings),
        "notes": list(result.notes),
        "verification": report and report.summary(),
    }


def _warn_of_memory(peak: int, limit: int | None) -> None:
    if limit is not None and peak > limit:
        say(
            "warning",
            f"the peak memory was {format_size(peak)}, more than --max-memory "
            f"{format_size(limit)}: the output is right, the memory estimate was not. "
            "Please report this",
        )


# Several windows of one training run.


def merge_windows(
    windows: Mapping[str, Recipe], out: Path, options: RunOptions, *, as_json: bool
) -> None:
    """Merge each window to its folder in OUT; those with the same checkpoints share one reading."""
    local_path(out)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, recipe in windows.items():
        alike.setdefault(tuple(recipe.experts), []).append(name)
    found: list[MergeResult] = []
    with ExitStack() as stack:
        readings = [
            (stack.enter_context(open_recipe(windows[names[0]])), names) for names in alike.values()
        ]
        for checkpoints, _ in readings:
            check_not_input(out, checkpoints.paths())
        stack.enter_context(_folder(out))
        made = {name: Staging(out / name, overwrite=options.overwrite) for name in windows}
        for staging in made.values():
            staging.check()
        folders: dict[str, Path] = {}
        for name, staging in made.items():
            folder = stack.enter_context(staging).folder
            assert folder is not None
            folders[name] = folder
        for checkpoints, names in readings:
            work = [(windows[name], folders[name]) for name in names]
            found += Together(checkpoints, options).write(work).values()
        for staging in made.values():
            staging.commit()
    notes = dict.fromkeys(note for result in found for note in result.notes)
    for note in notes:
        say("note", note)
    shown = [(str(out / name), _counted(recipe)) for name, recipe in windows.items()]
    if as_json:
        print_json({"windows": dict(shown), "notes": list(notes)})
        return
    for place, shares in shown:
        weights = ", ".join(f"{name} {share:.4g}" for name, share in shares.items())
        stdout().print(printable(f"{place}: {weights}"), soft_wrap=True)


@contextmanager
def _folder(out: Path) -> Generator[None]:
    """Create a folder, and remove it after an error if it is empty."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            out.rmdir()
        raise


def _counted(recipe: Recipe) -> dict[str, float]:
    """Return the relative weight of each checkpoint of a window; those of weight 0 are left out."""
    weights = recipe.parameters.get("weight", [e.weight for e in recipe.experts.values()])
    shares = zip(recipe.experts, cast("list[float]", weights), strict=True)
    return {name: share for name, share in shares if share}


# The recipes of a file before the one that makes its output.


def merge_stages(recipes: Sequence[tuple[Path, Recipe]], options: RunOptions) -> None:
    """Merge all recipes but the last, each into its own folder; these folders are normal outputs and stay.

    With `resume`, a finished stage is used if its files are unchanged, and its recipe and its
    sources are the same. Others are errors, or are merged anew with `overwrite`.
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
        if _is_taken(folder, options) and _is_same(folder, recipe, options):
            remove_remains(folder)
            say("note", f"stage {folder.name} is finished: {folder}")
            continue
        with disk_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        result = _merged(recipe, folder, options)
        say_all(result.warnings, result.notes, f"stage {folder.name}: ")
        say("note", f"stage {folder.name} is merged: {folder}")


def _check_places(recipes: Sequence[tuple[Path, Recipe]], options: RunOptions) -> None:
    """Raise an error for outputs that may not be made, or that are inputs of one of the recipes."""
    made: set[str] = set()
    given: list[Path] = []
    for folder, recipe in recipes:
        sources = [*_models(recipe), *statistics_of(recipe).values()]
        given += _places(source for source in sources if source not in made)
        made.add(str(folder))
    for number, (folder, _) in enumerate(recipes, 1):
        check_not_input(folder, given)
        if number == len(recipes) or not _is_taken(folder, options):
            Staging(folder, overwrite=options.overwrite, resume=options.resume).check()


def _check_sources(recipes: Sequence[tuple[Path, Recipe]]) -> None:
    """Open the existing models that later recipes read, to raise their errors before any merge."""
    made = {str(folder) for folder, _ in recipes}
    for _, recipe in recipes[1:]:
        for source in dict.fromkeys(_models(recipe)):
            if source not in made:
                open_checkpoint(source).close()


def _is_taken(folder: Path, options: RunOptions) -> bool:
    """Return whether a stage is already finished and is used as it is."""
    return options.resume and (folder / MANIFEST_NAME).exists()


def _models(recipe: Recipe) -> list[str]:
    experts = [expert.source for expert in recipe.experts.values()]
    return [*(() if recipe.base is None else (recipe.base,)), *experts]


def _places(sources: Iterable[str]) -> Iterator[Path]:
    """Yield those sources that are existing local paths; their readers will refuse invalid paths."""
    for source in sources:
        with suppress(OSError, RuntimeError, ValueError):
            if (path := local_path(source).expanduser()).exists():
                yield path


def _is_same(folder: Path, recipe: Recipe, options: RunOptions) -> bool:
    """Return whether a finished stage is the one that is to be made; without `overwrite`, raise if not."""
    try:
        _check_same(folder, recipe)
    except InputError:
        if options.overwrite:
            return False
        raise
    return True


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
    settled = {"method"} - wanted.keys()  # chosen by the merge if the recipe did not set it
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
