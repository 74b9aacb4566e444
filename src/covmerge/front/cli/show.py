"""Tables and facts of a plan and of a finished merge, at home in 80 columns without colour."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.table import Table

from covmerge.base.text import counted, some, spread
from covmerge.files.checkpoints.adapter_layout import PEFT_FORM
from covmerge.files.checkpoints.folder import read_config
from covmerge.files.checkpoints.modules import MODULES
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store
from covmerge.front.cli.console import printable
from covmerge.front.cli.machine import Speed
from covmerge.front.cli.units import format_flops, format_seconds
from covmerge.plan.planning import Plan
from covmerge.plan.recipe import Recipe, format_size
from covmerge.run.engine import MemoryPlan, Room, lost_before
from covmerge.run.export.library import architecture, part_class, sentence_class
from covmerge.run.result import MergeResult
from covmerge.run.verification import Verification

_LAYERS = 12  # of a table by layer
NOTE, WARNING = "note", "warning"  # labels of what a reader should not miss
_STYLES = {NOTE: "yellow", WARNING: "bold yellow"}


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns named in `right` hold numbers."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        empty.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",  # a name cut short cannot be looked up
        )
    return empty


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return labels with what there is to say beside them."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(label, printable(text), style=_STYLES.get(label))
    return grid


def show_plan(
    console: Console, plan: Plan, memory: MemoryPlan, speed: Speed, room: Room | None
) -> None:
    """Print a dry run."""
    console.print(f"Plan: merge {_what(plan.recipe)}. Nothing is written.", soft_wrap=True)
    rules = table("role", "rule", "tensors", "bytes", right=("tensors", "bytes"))
    for role, rule, count, size in plan.by_rule():
        rules.add_row(str(role), printable(rule), str(count), format_size(size))
    console.print(rules)
    largest = plan.peak_item
    console.print(
        facts(
            [
                *_weights(plan.recipe),
                *_heads({expert: list(kept) for expert, kept in plan.heads.items()}),
                (
                    "work",
                    f"reads {format_size(plan.read_bytes)}, writes {format_size(plan.write_bytes)}, "
                    f"{format_flops(plan.flops)} in {plan.recipe.dtype}",
                ),
                (
                    "peak memory",
                    f"{format_size(memory.peak)} expected: {format_size(memory.resident)} process, "
                    f"{format_size(memory.workspace)} workspace, "
                    f"{format_size(memory.in_flight)} read ahead and not yet written"
                    + _workers(memory.workers, memory.why),
                ),
                ("largest", f"{largest.tensor.name}, {format_size(largest.memory)} while merged"),
                ("disk", _disk(plan, room)),
                ("time", _time(plan, speed)),
                *((NOTE, note) for note in plan.notes),
            ]
        )
    )


def plan_summary(
    plan: Plan, memory: MemoryPlan, speed: Speed, room: Room | None
) -> dict[str, object]:
    """Return a dry run as plain JSON; sizes in bytes, times in seconds."""
    return {
        **plan.summary(),
        "weights": {name: expert.weight for name, expert in plan.recipe.experts.items()},
        "memory": {
            "peak": memory.peak,
            "resident": memory.resident,
            "workspace": memory.workspace,
            "in_flight": memory.in_flight,
            "workers": memory.workers,
            **({"workers_because": memory.why} if memory.why else {}),
        },
        "disk": {
            "needed": plan.write_bytes,
            "free": None if room is None else room.free,
            "folder": None if room is None else str(room.folder),
        },
        "estimate": {
            "seconds": speed.seconds(plan),
            "flops_per_second": speed.flops,
            "eigen_flops_per_second": speed.eigen,
            "processor_share": speed.share,
            "read_bytes_per_second": speed.read,
        },
    }


def show_result(console: Console, result: MergeResult, run: Mapping[str, Any]) -> None:
    """Print what a merge to disk did; `run` is its cost, as in the JSON summary."""
    report = cast("Verification", result.verification)
    stats = result.stats
    totals = stats["totals"]
    console.print(f"Merged {_what(result.recipe)}: {printable(str(report.folder))}", soft_wrap=True)
    rules = table("role", "rule", "tensors", right=("tensors",))
    for row in totals["by_rule"]:
        rules.add_row(row["role"], printable(row["rule"]), str(row["tensors"]))
    console.print(rules)
    if "quantised" in totals:
        show_losses(console, totals["quantised"]["layers"])
    checks = [check.name for check in report.checks]
    console.print(
        facts(
            [
                *((WARNING, warning) for warning in result.warnings),
                *((NOTE, note) for note in result.notes),
                ("run", _run(run)),
                (
                    "peak memory",
                    f"{format_size(run['peak_memory'])} measured, "
                    f"{format_size(run['expected_peak_memory'])} expected",
                ),
                *result.noticed,
                *_rounding(result),
                *_heads(stats["heads"]),
                ("verified", ", ".join(checks)),
            ]
        )
    )
    console.print("\nNext:")
    for line in _next_commands(report.folder):
        console.print(f"  {line}", soft_wrap=True)


def show_losses(console: Console, layers: Sequence[Mapping[str, Any]]) -> None:
    """Print what rounding to a quantised format did to the update, the worst layers of many."""
    ordered = sorted(layers, key=lambda own: -own.get("lost", 0.0))
    shown = [own for own in layers if own in ordered[:_LAYERS]]
    numbers = ("tensors", "rounding", "noise", "kept")
    rows = table("layer", *numbers, right=numbers)
    for own in shown:
        lost, kept = (f"{own[key]:.1%}" if key in own else "-" for key in ("lost", "kept"))
        rows.add_row(
            printable(own["layer"]), str(own["tensors"]), f"{own['error']:.2%}", lost, kept
        )
    console.print(rows)
    told = "rounding: of the weights, at most of a tensor; noise and kept: of the merged update"
    more = len(layers) - len(shown)
    console.print(
        f"{told}{f'; {more} layers with less noise are in covmerge.json' if more else ''}"
    )


def show_adapter(console: Console, result: MergeResult, run: Mapping[str, Any]) -> None:
    """Print what a merge of adapters into one did."""
    out = cast("Verification", result.verification).folder
    stats = result.stats
    console.print(f"Merged {_what(result.recipe)}: {printable(str(out))}", soft_wrap=True)
    places = {
        name: entry["adapter"] for name, entry in stats["tensors"].items() if "adapter" in entry
    }
    merged = {name: place for name, place in places.items() if "rank" in place}
    whole = len(places) - len(merged)
    totals, report = stats["totals"], cast("Verification", result.verification)
    ranks = [place["rank"] for place in merged.values()]
    worst = max(merged, key=lambda name: merged[name]["discarded_energy"])
    lost = merged[worst]["discarded_energy"]
    console.print(
        facts(
            [
                *((WARNING, warning) for warning in result.warnings),
                *((NOTE, note) for note in result.notes),
                (
                    "adapter",
                    f"{counted(len(merged), 'tensor')}, rank {spread(ranks)}"
                    + (f"; {counted(whole, 'tensor')} whole" if whole else ""),
                ),
                (
                    "truncation",
                    f"loses {totals['discarded_energy']:.2%} of the update's energy, at most "
                    f"{lost:.2%} of a tensor's ({worst})"
                    if lost > 1e-12
                    else "none: the updates are exact",
                ),
                ("rank", _ranks_by_energy([stats["tensors"][name] for name in merged])),
                (
                    "left out",
                    f"{totals['left_out_energy']:.2%} of the update's energy, in tensors without "
                    "factors"
                    if totals["left_out_energy"]
                    else "nothing",
                ),
                *result.noticed,
                (
                    "run",
                    f"{format_seconds(run['seconds'])}; {counted(run['threads'], 'thread')} "
                    f"on {run['device']}",
                ),
                ("peak memory", f"{format_size(run['peak_memory'])} measured"),
                *_heads(stats["heads"]),
                *_rounding(result),
                ("verified", ", ".join(check.name for check in report.checks)),
            ]
        )
    )
    loads = "PeftModel.from_pretrained(base, {})"
    if result.recipe.output.names != PEFT_FORM:
        loads = "pipe.load_lora_weights({})"
    load = loads.format(json.dumps(str(out)))
    console.print(f"\nNext:\n  {printable(load)}", soft_wrap=True)


def _ranks_by_energy(layers: Sequence[Mapping[str, Any]]) -> str:
    """Say which rank would keep how much of every layer."""
    parts: list[str] = []
    for share in (0.9, 0.99, 0.999):
        ranks = [_rank_for(share, layer) for layer in layers]
        known = [rank for rank in ranks if rank is not None]
        most = max(known) if len(known) == len(ranks) else "more than is recorded"
        parts.append(f"{100 * share:g} %: {most}")
    return "to keep of every layer's energy " + ", ".join(parts)


def _rank_for(share: float, layer: Mapping[str, Any]) -> int | None:
    """The fewest leading singular values with this share of all energy; None: not so few."""
    wanted = share * layer["merged_norm"] ** 2 * (1.0 - 1e-6)
    energies = accumulate(value**2 for value in layer["adapter"]["singular_values"])
    return next((rank for rank, energy in enumerate(energies, start=1) if energy >= wanted), None)


def _what(recipe: Recipe) -> str:
    names = list(recipe.experts)
    into = "" if recipe.base is None else f" into {recipe.base}"
    if recipe.moe is not None:
        into += f" as one mixture ({recipe.moe.architecture}); other tensors by the rules, else"
    return printable(f"{some(names)}{into} by {recipe.method}")


def _weights(recipe: Recipe) -> list[tuple[str, str]]:
    """What each of several experts counts for."""
    weights = {name: expert.weight for name, expert in recipe.experts.items()}
    if all(weight == 1.0 for weight in weights.values()):
        return [("weights", "1 each")] if len(weights) > 1 else []
    shown = (
        f"{name} {weight:.4g}" if isinstance(weight, float) else f"{name} {json.dumps(weight)}"
        for name, weight in weights.items()
    )
    return [("weights", ", ".join(shown))]


def _rounding(result: MergeResult) -> list[tuple[str, str]]:
    """What storing loses of the merged update; without a base there is none."""
    if result.recipe.base is None:
        return []
    totals = result.stats["totals"]
    loss = f"{totals['rounding_loss']:.2%} of the update's norm"
    return [("rounding", f"storing loses {loss}{lost_before(totals)}")]


def _heads(heads: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    kept = [f"{expert} ({counted(len(names), 'tensor')})" for expert, names in heads.items()]
    return [("heads kept", f"{', '.join(kept)}, one file each under heads/")] if kept else []


def _disk(plan: Plan, room: Room | None) -> str:
    if room is None:
        return f"{format_size(plan.write_bytes)} needed"
    return f"{format_size(room.needed)} needed, {format_size(room.free)} free at {room.folder}"


def _time(plan: Plan, speed: Speed) -> str:
    rates = f"{format_flops(speed.flops)}/s in matrix products"
    rates += f", {format_flops(speed.eigen)}/s in eigenproblems"
    if speed.read is not None and speed.read_from is not None:
        rates += f", {format_size(int(speed.read))}/s read from {speed.read_from.name}"
    else:
        rates += "; downloading and reading are not counted"
    busy = ""
    if speed.is_busy:
        busy = (
            f". The machine was busy: this test got {speed.share:.0%} of the processors' time, and the "
            "estimate is for all of it"
        )
    return f"about {format_seconds(speed.seconds(plan))}, a rough estimate from a short test: {rates}{busy}"


def _run(run: Mapping[str, Any]) -> str:
    resumed = run["resumed_items"]
    return (
        f"{format_seconds(run['seconds'])}: read {format_seconds(run['read_seconds'])}, compute "
        f"{format_seconds(run['compute_seconds'])}, write {format_seconds(run['write_seconds'])}, "
        f"overlapping; {counted(run['threads'], 'thread')} on {run['device']}; "
        f"{format_seconds(run['wall_seconds'])} with planning and checks"
        + _workers(run.get("workers", 1), run.get("workers_because", ""))
        + (f"; {resumed} of {run['items']} items were done by an earlier run" if resumed else "")
    )


def _workers(count: int, why: str) -> str:
    """How many processes did the work, where it was not one, or was not said."""
    if count == 1 and not why:
        return ""
    return f"; {count} process{'' if count == 1 else 'es'}{f' ({why})' if why else ''}"


def _next_commands(out: Path | Store) -> list[str]:
    commands = [f"covmerge verify {shlex.quote(str(out))}"]
    if isinstance(out, Path) and (out / MODULES).is_file():
        named = sentence_class(LocalFolder(out))
        load = f"from sentence_transformers import {named}; {named}({json.dumps(str(out))})"
        commands.append(f"python -c {shlex.quote(load)}")
    elif isinstance(out, Path) and (out / "config.json").is_file():
        config = read_config(out / "config.json")
        part = part_class(config)
        named = architecture(config) or "AutoModel"  # as the model card has it
        library, loader = ("diffusers", part) if part else ("transformers", named)
        load = f"from {library} import {loader}; {loader}.from_pretrained({json.dumps(str(out))})"
        commands.append(f"python -c {shlex.quote(load)}")
    return [printable(command) for command in commands]
