"""Tables and facts of a plan and of a finished merge, for 80 columns without colour."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from covmerge.base.settings import UNNAMED_NOTE
from covmerge.base.sizes import format_size
from covmerge.base.text import counted, some, spread
from covmerge.files.checkpoints.base import PEFT_FORM
from covmerge.files.checkpoints.folder import read_config
from covmerge.files.checkpoints.modules import MODULES
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store
from covmerge.front.cli.console import (
    NOTE,
    WARNING,
    facts,
    format_flops,
    format_seconds,
    printable,
    table,
)
from covmerge.front.cli.machine import Speed
from covmerge.front.scoring import score_command
from covmerge.maths.methods.mergekit import called
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Recipe, dump_recipe
from covmerge.run.engine.budget import MemoryPlan
from covmerge.run.engine.entries import rounding_said
from covmerge.run.engine.outputs import Room
from covmerge.run.export.adapter import architecture, part_class, sentence_class
from covmerge.run.result import MergeResult
from covmerge.run.verification import Verification

_LAYERS = 12  # in a table by layer
_EXACT = 1e-12  # share of an update's energy that is lost to rounding, not to the rank
_LOSS = 0.01  # share of the update's norm: a larger loss to rounding is always shown
_FAILS = "a piece of the merge was tried for this, and the merge will fail as it did"


def show_plan(
    console: Console, plan: Plan, memory: MemoryPlan, speed: Speed, room: Room | None
) -> None:
    """Print the plan of a dry run."""
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
                *_heads({expert: list(names) for expert, names in plan.heads.items()}),
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
                *([(WARNING, f"{_FAILS}: {speed.problem}")] if speed.problem else []),
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
            "hashed_bytes_per_second": speed.hashed,
            "start_seconds": speed.begun,
            **({"problem": speed.problem} if speed.problem else {}),
        },
    }


def show_result(
    console: Console, result: MergeResult, run: Mapping[str, Any], *, verbose: bool = False
) -> None:
    """Print how tensors were merged to disk and why, what to check, and what to do next.

    `run` is the cost of the merge, as in the JSON summary.
    """
    report = cast("Verification", result.verification)
    stats = result.stats
    totals = stats["totals"]
    out, is_adapter = report.folder, result.recipe.output.format == "adapter"
    console.print(f"Merged {_what(result.recipe)}: {printable(str(out))}", soft_wrap=True)
    if verbose and not is_adapter:
        rules = table("role", "rule", "tensors", right=("tensors",))
        for row in totals["by_rule"]:
            rules.add_row(row["role"], printable(row["rule"]), str(row["tensors"]))
        console.print(rules)
    if "quantised" in totals:
        show_losses(console, totals["quantised"]["layers"])
    resumed = f"{run['resumed_items']} of {run['items']} items were done by an earlier run"
    console.print(
        facts(
            [
                ("taken", _taken(result)),
                *([("resumed", resumed)] if run["resumed_items"] else []),
                *(_factors(result, verbose=verbose) if is_adapter else ()),
                *_heads(stats["heads"]),
                *_remarks(result),
                *(_details(result, run) if verbose else ()),
            ]
        )
    )
    console.print("\nNext:")
    for command in _load_adapter(result, out) if is_adapter else _next_commands(out):
        console.print(f"  {printable(command)}", soft_wrap=True)
    score = score_command(dump_recipe(result.recipe), str(out))
    if score is not None:
        console.print("How good it is, only a score tells. Score it beside other methods:")
        console.print(f"  {printable(score)}", soft_wrap=True)


def _taken(result: MergeResult) -> str:
    """Return how many tensors each rule made, and why this method was chosen."""
    counts: dict[str, int] = {}
    for row in result.stats["totals"]["by_rule"]:
        rule = row["rule"].partition(" (")[0]
        counts[rule] = counts.get(rule, 0) + row["tensors"]
    method = called(result.recipe.method, result.recipe.parameters)
    ordered = sorted(counts.items(), key=lambda item: (item[0] != method, -item[1]))
    named = {"base": "the base's own"}
    shown = ", ".join(f"{named.get(r, r)} for {counted(c, 'tensor')}" for r, c in ordered)
    why = [
        note.removeprefix(UNNAMED_NOTE) for note in result.notes if note.startswith(UNNAMED_NOTE)
    ]
    return f"{shown}. No method is named: {why[0]}" if why else shown


def _remarks(result: MergeResult) -> list[tuple[str, str]]:
    """Return warnings and notes; if there are none, that nothing stands out, and the number of checks."""
    rows = [(WARNING, warning) for warning in result.warnings]
    rows += [(NOTE, note) for note in result.notes if not note.startswith(UNNAMED_NOTE)]
    if _is_much_lost(result):
        rows = [*_rounding(result), *rows]
    count = counted(len(cast("Verification", result.verification).checks), "check")
    return rows or [
        ("look at", f"nothing stands out; the output was read again and passed {count}")
    ]


def _is_much_lost(result: MergeResult) -> bool:
    """Return whether the loss to rounding, in storing or earlier steps, is large and always shown.

    A loss that was not measured counts as large.
    """
    totals = result.stats["totals"]
    unmeasured = 1.0 if totals.get("arithmetic") else 0.0
    return max(totals["rounding_loss"], totals.get("arithmetic_loss", unmeasured)) >= _LOSS


def _details(result: MergeResult, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return time and memory, the method's diagnostics, the loss in storing, and the checks."""
    return [
        ("run", _run(run)),
        (
            "peak memory",
            f"{format_size(run['peak_memory'])} measured, "
            f"{format_size(run['expected_peak_memory'])} expected",
        ),
        *result.diagnostics,
        *(() if _is_much_lost(result) else _rounding(result)),
        (
            "verified",
            ", ".join(check.name for check in cast("Verification", result.verification).checks),
        ),
    ]


def show_losses(console: Console, layers: Sequence[Mapping[str, Any]]) -> None:
    """Print the update's loss from rounding to a quantised format; of many layers only the worst."""
    ordered = sorted(layers, key=lambda layer: -layer.get("lost", 0.0))
    shown = [layer for layer in layers if layer in ordered[:_LAYERS]]
    numbers = ("tensors", "rounding", "noise", "kept")
    rows = table("layer", *numbers, right=numbers)
    for layer in shown:
        lost, kept = (f"{layer[key]:.1%}" if key in layer else "-" for key in ("lost", "kept"))
        rows.add_row(
            printable(layer["layer"]), str(layer["tensors"]), f"{layer['error']:.2%}", lost, kept
        )
    console.print(rows)
    text = "rounding: of the weights, at most of a tensor; noise and kept: of the merged update"
    more = len(layers) - len(shown)
    console.print(
        f"{text}{f'; {more} layers with less noise are in covmerge.json' if more else ''}"
    )


def _factors(result: MergeResult, *, verbose: bool) -> list[tuple[str, str]]:
    """Return the ranks of an adapter, and how much it loses."""
    tensors, totals = result.stats["tensors"], result.stats["totals"]
    places = {name: entry["adapter"] for name, entry in tensors.items() if "adapter" in entry}
    merged = {name: place for name, place in places.items() if "rank" in place}
    whole = len(places) - len(merged)
    worst = max(merged, key=lambda name: merged[name]["discarded_energy"])
    lost = merged[worst]["discarded_energy"]
    left_out = totals["left_out_energy"]
    rows = [
        (
            "adapter",
            f"{counted(len(merged), 'tensor')}, rank {spread([p['rank'] for p in merged.values()])}"
            + ("" if lost > _EXACT else ", exact")
            + (f"; {counted(whole, 'tensor')} whole" if whole else ""),
        )
    ]
    if lost > _EXACT:
        rows.append(
            (
                "truncation",
                f"loses {totals['discarded_energy']:.2%} of the update's energy, at most "
                f"{lost:.2%} of a tensor's ({worst})",
            )
        )
    if verbose:
        rows.append(("rank", _ranks_by_energy([tensors[name] for name in merged])))
    if left_out:
        rows.append(
            ("left out", f"{left_out:.2%} of the update's energy, in tensors without factors")
        )
    elif verbose:
        rows.append(("left out", "nothing"))
    return rows


def _ranks_by_energy(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the ranks that keep given shares of every layer's energy."""
    parts: list[str] = []
    for share in (0.9, 0.99, 0.999):
        ranks = [_rank_for(share, layer) for layer in layers]
        known = [rank for rank in ranks if rank is not None]
        most = max(known) if len(known) == len(ranks) else "more than is recorded"
        parts.append(f"{100 * share:g} %: {most}")
    return "to keep of every layer's energy " + ", ".join(parts)


def _rank_for(share: float, layer: Mapping[str, Any]) -> int | None:
    """Return the fewest leading singular values with this share of all energy; None if not recorded."""
    wanted = share * layer["merged_norm"] ** 2 * (1.0 - 1e-6)
    energies = accumulate(value**2 for value in layer["adapter"]["singular_values"])
    return next((rank for rank, energy in enumerate(energies, start=1) if energy >= wanted), None)


def _what(recipe: Recipe) -> str:
    names = list(recipe.experts)
    into = "" if recipe.base is None else f" on {recipe.base}"
    if recipe.moe is not None:
        into += f" as one mixture ({recipe.moe.architecture}); other tensors by the rules, else"
    return printable(f"{some(names)}{into} by {called(recipe.method, recipe.parameters)}")


def _weights(recipe: Recipe) -> list[tuple[str, str]]:
    weights = {name: expert.weight for name, expert in recipe.experts.items()}
    if all(weight == 1.0 for weight in weights.values()):
        return [("weights", "1 each")] if len(weights) > 1 else []
    shown = (
        f"{name} {weight:.4g}" if isinstance(weight, float) else f"{name} {json.dumps(weight)}"
        for name, weight in weights.items()
    )
    return [("weights", ", ".join(shown))]


def _rounding(result: MergeResult) -> list[tuple[str, str]]:
    """Return the loss of the merged update in storing; a merge without a base has none."""
    if result.recipe.base is None:
        return []
    return [("rounding", rounding_said(result.stats["totals"]))]


def _heads(heads: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    texts = [f"{expert} ({counted(len(names), 'tensor')})" for expert, names in heads.items()]
    return [("heads kept", f"{', '.join(texts)}, one file each under heads/")] if texts else []


def _disk(plan: Plan, room: Room | None) -> str:
    if room is None:
        return f"{format_size(plan.write_bytes)} needed"
    return f"{format_size(room.needed)} needed, {format_size(room.free)} free at {room.folder}"


def _time(plan: Plan, speed: Speed) -> str:
    rates = f"{format_flops(speed.flops)}/s in matrix products"
    rates += "" if speed.eigen is None else f", {format_flops(speed.eigen)}/s in eigenproblems"
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
    return (
        f"{format_seconds(run['seconds'])}: read {format_seconds(run['read_seconds'])}, compute "
        f"{format_seconds(run['compute_seconds'])}, write {format_seconds(run['write_seconds'])}, "
        f"overlapping; {counted(run['threads'], 'thread')} on {run['device']}; "
        f"{format_seconds(run['wall_seconds'])} with planning and checks"
        + _workers(run.get("workers", 1), run.get("workers_because", ""))
    )


def _workers(count: int, why: str) -> str:
    """Return how many processes worked, unless there was one and no reason is given."""
    if count == 1 and not why:
        return ""
    return f"; {count} process{'' if count == 1 else 'es'}{f' ({why})' if why else ''}"


def _load_adapter(result: MergeResult, out: Path | Store) -> list[str]:
    where = json.dumps(str(out))
    if result.recipe.output.names == PEFT_FORM:
        return [f"PeftModel.from_pretrained(base, {where})"]
    return [f"pipe.load_lora_weights({where})"]


def _next_commands(out: Path | Store) -> list[str]:
    commands = [f"covmerge verify {shlex.quote(str(out))}"]
    if isinstance(out, Path) and (out / MODULES).is_file():
        named = sentence_class(LocalFolder(out))
        load = f"from sentence_transformers import {named}; {named}({json.dumps(str(out))})"
        commands.append(f"python -c {shlex.quote(load)}")
    elif isinstance(out, Path) and (out / "config.json").is_file():
        config = read_config(out / "config.json")
        part = part_class(config)
        named = architecture(config) or "AutoModel"  # as in the model card
        library, loader = ("diffusers", part) if part else ("transformers", named)
        load = f"from {library} import {loader}; {loader}.from_pretrained({json.dumps(str(out))})"
        commands.append(f"python -c {shlex.quote(load)}")
    return commands
