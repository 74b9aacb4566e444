"""What `covmerge merge` does with a recipe: a dry run, or the merge and its report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from covmerge import api
from covmerge.api import MergeResult
from covmerge.cli.console import print_json, printable, say, stderr, stdout
from covmerge.cli.machine import measure_speed
from covmerge.cli.progress import progress_on
from covmerge.cli.show import plan_summary, show_adapter, show_plan, show_result
from covmerge.engine import room_for
from covmerge.errors import InputError
from covmerge.recipe import Recipe, format_size
from covmerge.reporting import FILE_NAME, check_packages, write_html


@dataclass(frozen=True)
class RunFlags:
    """The flags that say how to merge; sizes in bytes."""

    device: str
    threads: int | None
    max_memory: int | None
    resume: bool
    overwrite: bool
    report: bool
    as_json: bool


def dry_run(recipe: Recipe, out: Path | None, flags: RunFlags) -> None:
    """Print the plan.

    Raises:
        InputError: whatever would stop the merge before its first tensor.
        ResourceError: the output does not fit on the disk; the plan is printed before.
    """
    if recipe.output.format == "adapter":
        raise InputError(
            "there is no dry run of a merge to an adapter: it reads nothing of the base, and leaves "
            "nothing behind if it fails"
        )
    plan, memory = api.plan_recipe(
        recipe, device=flags.device, threads=flags.threads, max_memory=flags.max_memory
    )
    speed = measure_speed(recipe, plan.compute_dtype, flags.device, flags.threads)
    room = None if out is None else room_for([plan], out)
    if flags.as_json:
        print_json(plan_summary(plan, memory, speed, room))
    else:
        show_plan(stdout(), plan, memory, speed, room)
    # What an earlier merge holds may be the space that this one will use.
    if room is not None and not (flags.resume or flags.overwrite):
        room.check()


def merge_to(recipe: Recipe, out: Path, flags: RunFlags) -> None:
    """Merge, and print what happened.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.
        CheckFailed: the output failed its verification.
        KeyboardInterrupt: with how to go on.
    """
    if flags.report:
        check_packages()
    start = time.perf_counter()
    try:
        result = api.run_recipe(
            recipe,
            out,
            device=flags.device,
            threads=flags.threads,
            max_memory=flags.max_memory,
            resume=flags.resume,
            overwrite=flags.overwrite,
            progress=progress_on(stderr()),
        )
    except KeyboardInterrupt:
        # An adapter is a matter of seconds, and leaves nothing to resume.
        resumable = recipe.output.format == "model"
        again = "interrupted; run again with --resume" if resumable else "interrupted"
        raise KeyboardInterrupt(again) from None
    run = _cost(result, flags, wall_seconds=time.perf_counter() - start)
    if not flags.as_json:
        show = show_adapter if recipe.output.format == "adapter" else show_result
        show(stdout(), result, run)
    page = _write_page(result, out, flags) if flags.report else None
    if flags.as_json:
        print_json({**_summary(result, run), **({} if page is None else {"report": str(page)})})
    elif page is not None:
        stdout().print(printable(f"\nReport: {page}"), soft_wrap=True)
    _warn_of_memory(run["peak_memory"], flags.max_memory)


def _write_page(result: MergeResult, out: Path, flags: RunFlags) -> Path:
    report = api.report(
        out,
        device=flags.device,
        threads=flags.threads,
        max_memory=flags.max_memory,
        progress=progress_on(stderr()),
        merged=result,
    )
    write_html(report, out / FILE_NAME)
    return out / FILE_NAME


def _cost(result: MergeResult, flags: RunFlags, *, wall_seconds: float) -> dict[str, Any]:
    return {
        **result.run,
        "wall_seconds": wall_seconds,
        "threads": flags.threads or torch.get_num_threads(),
        "device": flags.device,
    }


def _summary(result: MergeResult, run: dict[str, Any]) -> dict[str, Any]:
    report = result.verification
    return {
        "path": str(result.path),
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
