"""`covmerge plan`: what a merge would take, here or on machines that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import print_json, printable, stdout
from covmerge.front.cli.units import format_seconds

if TYPE_CHECKING:
    from covmerge.plan.planning import Plan
    from covmerge.run.engine import Forecast


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yml", help="Recipe file.")],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="Where the output would be: there has to be room for it, and what goes to a bucket is "
            "sent when it is made.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Machines: nodes=16,gpus=8,nic=25GB/s,disk=7GB/s, and cores=, memory=, storage=, flops=, "
            "eigen=, stream=, hash=, start= (docs/scale.md). Without it the plan is of this machine, as by "
            "--dry-run.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a merge would take: tensors, bytes, memory, time. Headers are read, and nothing is written.

    covmerge plan recipe.yml --cluster nodes=16,gpus=8,nic=25GB/s,disk=7GB/s
    """
    from covmerge.front import api
    from covmerge.front.cli import flags, merging
    from covmerge.run.engine import RunOptions, parse_hardware

    if cluster is None:
        read = flags.read_recipe(recipe, flags.RecipeFlags())
        merging.dry_run(read, out, RunOptions(), as_json=as_json)
        return
    hardware = parse_hardware(cluster)
    planned, predicted = api.forecast_recipe(
        flags.read_recipe(recipe, flags.RecipeFlags()), hardware, out
    )
    if as_json:
        print_json({**planned.summary(), "cluster": _as_json(predicted)})
    else:
        _show(planned, predicted)


def _as_json(predicted: Forecast) -> dict[str, Any]:
    return {
        "nodes": predicted.hardware.nodes,
        "workers": predicted.hardware.workers,
        "seconds": predicted.seconds,
        "bottleneck": predicted.bottleneck,
        "memory": predicted.memory,
        "stages": [
            {
                "stage": stage.name,
                "seconds": stage.seconds,
                "bound": stage.bound,
                "busy": dict(stage.times),
                "computing": dict(stage.computing),
                "link_bytes": dict(stage.link_bytes),
                "total_bytes": stage.total_bytes,
            }
            for stage in predicted.stages
        ],
    }


def _show(planned: Plan, predicted: Forecast) -> None:
    from covmerge.base.text import counted
    from covmerge.front.cli.show import facts, table
    from covmerge.plan.recipe import format_size

    hardware, recipe = predicted.hardware, planned.recipe
    console = stdout()
    console.print(
        printable(
            f"Plan: merge {counted(len(recipe.experts), 'expert')} by {recipe.method} on "
            f"{counted(hardware.nodes, 'node')}, {counted(hardware.workers, 'process', 'processes')} each. "
            "Nothing is written."
        ),
        soft_wrap=True,
    )
    right = ("time", *hardware.rates, "all nodes")
    rows = table("stage", *right, "waits for", right=right)
    for stage in predicted.stages:
        rows.add_row(
            stage.name,
            format_seconds(stage.seconds),
            *map(format_size, stage.link_bytes.values()),
            format_size(stage.total_bytes),
            stage.bound,
        )
    console.print(rows)
    shared = "" if hardware.storage is None else ", storage of all together"
    rates = ", ".join(f"{name} {format_size(int(rate))}/s" for name, rate in hardware.rates.items())
    console.print(
        facts(
            [
                ("time", f"about {format_seconds(predicted.seconds)}, by the rates given: {rates}"),
                ("links", f"{' and '.join(hardware.links)} of the busiest node{shared}"),
                ("bottleneck", predicted.bottleneck),
                (
                    "memory",
                    f"{format_size(predicted.memory)} a node, by '{predicted.tensor}' in each process",
                ),
                *(("note", note) for note in planned.notes),
            ]
        )
    )
