"""What `covmerge merge` does with a recipe: a dry run, or the merge and its report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import InputError
from covmerge.files.checkpoints.staging import Staging, destination_of
from covmerge.files.stores.address import address_of, local_path
from covmerge.front import api
from covmerge.front.cli.console import print_json, printable, say, stderr, stdout
from covmerge.front.cli.machine import measure_speed
from covmerge.front.cli.progress import BytesProgress
from covmerge.front.cli.show import plan_summary, show_adapter, show_plan, show_result
from covmerge.front.reporting import FILE_NAME, ReportJob, check_packages, write_html
from covmerge.plan.recipe import Recipe, format_size
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import room_for
from covmerge.run.result import MergeResult

# What the spectra of a report may take of the FLOPs of its merge. A decomposition has five to ten times the
# seconds of as many FLOPs in products.
_SPECTRAL_SHARE = 0.2


def dry_run(recipe: Recipe, out: Path | None, options: RunOptions, *, as_json: bool) -> None:
    """Print the plan.

    Raises:
        InputError: whatever would stop the merge before its first tensor.
            The plan is printed before what the place of the output would stop.
        ResourceError: the output does not fit on the disk; the plan is printed before.
    """
    plan, memory = api.plan_recipe(recipe, options)
    # This machine's speed, whose device need not be what a cluster's nodes have.
    device = options.device if options.cluster is None else "cpu"
    speed = measure_speed(recipe, plan.compute_dtype, device, options.threads)
    room = None if out is None else room_for([plan], destination_of(out).work.folder or out)
    if as_json:
        print_json(plan_summary(plan, memory, speed, room))
    else:
        show_plan(stdout(), plan, memory, speed, room)
    if out is not None:
        Staging(out, overwrite=options.overwrite, resume=options.resume).foresee()
    # What an earlier merge holds may be the space that this one will use.
    if room is not None and not (options.resume or options.overwrite):
        room.check()


def check_report(recipe: Recipe, out: Path) -> None:
    """Refuse, before the work, what no report can be made of.

    Raises:
        InputError: a package of the page is missing, the recipe has no base, or the output is elsewhere.
    """
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
    """Merge, and print what happened.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.
        CheckFailed: the output failed its verification.
        KeyboardInterrupt: with how to go on.
    """
    start = time.perf_counter()
    try:
        result = api.run_recipe(recipe, out, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run again with --resume") from None
    if result.verification is None:  # another rank has published it
        _say_published(result, out, as_json=as_json)
        return
    run = _cost(result, options, wall_seconds=time.perf_counter() - start)
    if not as_json:
        show = show_adapter if recipe.output.format == "adapter" else show_result
        show(stdout(), result, run, verbose=verbose)
    page = _write_page(result, out, options) if report else None
    if as_json:
        print_json({**_summary(result, run), **({} if page is None else {"report": str(page)})})
    elif page is not None:
        stdout().print(printable(f"\nReport: {page}"), soft_wrap=True)
    _warn_of_memory(run["peak_memory"], options.max_memory)


def _say_published(result: MergeResult, out: Path, *, as_json: bool) -> None:
    """Say that the output is there, which another process made."""
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


def _cost(result: MergeResult, options: RunOptions, *, wall_seconds: float) -> dict[str, Any]:
    return {
        **result.run,
        "wall_seconds": wall_seconds,
        "threads": options.threads or torch.get_num_threads(),
        "device": str(options.torch_device),
    }


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
