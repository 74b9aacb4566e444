"""`covmerge explain`: which routes a layer of some shape takes, and what each would cost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.front.cli.console import print_json, stdout
from covmerge.front.cli.units import format_flops

if TYPE_CHECKING:
    from covmerge.maths.linalg.auto import Choice


def explain(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="Of the layer, d_out x d_in: 3072x768.")
    ],
    experts: Annotated[int, typer.Option(min=1, help="How many experts are merged.")] = 8,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="The experts are adapters of this rank.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the mathematics: float32 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="Where it is done: cpu or cuda.")] = "cpu",
    method: Annotated[
        list[str] | None,
        typer.Option(help="Show these methods; by default all.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the routes that a layer's shape leads to, with their FLOPs and memory."""
    from covmerge.base.errors import InputError
    from covmerge.maths.linalg.auto import EIGENPROBLEM, routes
    from covmerge.maths.methods import registry

    sizes = re.fullmatch(r"([1-9]\d{0,8})[x×,]([1-9]\d{0,8})", shape.replace(" ", ""))
    if sizes is None:
        raise InputError(f"SHAPE is {shape!r}; it must be d_out x d_in: 3072x768")
    if dtype not in ("float32", "float64"):
        raise InputError(f"--dtype is {dtype!r}; it must be float32 or float64")
    if device not in EIGENPROBLEM:
        raise InputError(f"--device is {device!r}; it must be {' or '.join(EIGENPROBLEM)}")
    d_out, d_in = int(sizes[1]), int(sizes[2])
    itemsize = {"float32": 4, "float64": 8}[dtype]
    choices = routes(d_out, d_in, experts, itemsize, rank, device)
    names = [registry.get(name).name for name in method or registry.names()]
    costs = {name: registry.get(name).cost(d_out, d_in, experts, itemsize) for name in names}
    if as_json:
        print_json(
            {
                "shape": [d_out, d_in],
                "experts": experts,
                "rank": rank,
                "dtype": dtype,
                "device": device,
                "eigenproblem": EIGENPROBLEM[device],
                "questions": [_as_json(choice) for choice in choices],
                "methods": {
                    name: {"flops": cost.flops, "workspace": cost.workspace}
                    for name, cost in costs.items()
                },
            }
        )
        return
    _show(choices)
    console = stdout()
    if device != "cpu":
        console.print(
            f"Of {device} the table is that of an H100: an eigenproblem takes as long as\n"
            f"{EIGENPROBLEM[device]:g} products and some time for each column, and float64 no longer than\n"
            "float32. Systems, adapters and methods are counted as on a CPU.\n"
        )
    console.print(
        "A float64 operation counts as two on a CPU; workspace is beside the updates and\n"
        "the result. Methods as on updates that are not adapters:\n"
    )
    _show_methods(costs)


def _as_json(choice: Choice) -> dict[str, Any]:
    return {
        "question": choice.question,
        "taken": choice.taken,
        "why": choice.why,
        "routes": {
            name: {"flops": cost.flops, "workspace": cost.workspace}
            for name, cost in choice.routes.items()
        },
    }


def _show(choices: list[Choice]) -> None:
    from covmerge.front.cli.show import table
    from covmerge.plan.recipe import format_size

    rows = table("question", "route", "work", "workspace", "", right=("work", "workspace"))
    for choice in choices:
        question = choice.question
        for name, cost in choice.routes.items():
            taken = f"taken: {choice.why}" if name == choice.taken else ""
            rows.add_row(
                question, name, format_flops(cost.flops), format_size(cost.workspace), taken
            )
            question = ""
        rows.add_section()
    stdout().print(rows)


def _show_methods(costs: dict[str, Any]) -> None:
    from covmerge.front.cli.show import table
    from covmerge.plan.recipe import format_size

    rows = table("method", "work", "workspace", right=("work", "workspace"))
    for name, cost in sorted(costs.items(), key=lambda pair: pair[1].flops):
        rows.add_row(name, format_flops(cost.flops), format_size(cost.workspace))
    stdout().print(rows)
