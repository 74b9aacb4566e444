"""`covmerge methods`: the list of methods and steps, or the page of one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.base.sizes import format_size
from covmerge.front.cli.catalogue import law_texts, markdown, page, parameter_row, step_page
from covmerge.front.cli.console import facts, format_flops, print_json, say, stdout, table

if TYPE_CHECKING:
    from covmerge.maths.linalg.auto import Choice, Cost
    from covmerge.maths.methods import Method
    from covmerge.maths.registry import Table as Registry
    from covmerge.maths.steps import Step


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="One method or step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all pages as Markdown: docs/methods.md.")
    ] = False,
) -> None:
    """List the merge methods and the steps around them, or show one: equation, parameters, laws, paper."""
    from covmerge.maths.methods import registry
    from covmerge.maths.steps import registry as steps

    if as_markdown:
        typer.echo(markdown(registry, steps, registry.absent.items()), nl=False)
    elif name is not None:
        is_step = name in steps and name not in registry
        shown = step_page(steps.get(name)) if is_step else page(registry.get(name))
        if as_json:
            print_json(shown)
        else:
            _show(shown, _of_step(shown) if is_step else _of_method(shown))
    elif as_json:
        print_json([page(method) for method in registry])
        for why in (*registry.broken.values(), *steps.broken.values()):
            say("warning", why)
    else:
        _show_list(registry, steps)


_LONGEST = 30  # letters of a name on one line


def _show_list(methods: Registry[Method], steps: Registry[Step]) -> None:
    rows = table("name", "what it does", "data", "paper")
    rows.columns[0].width = min(_LONGEST, max(len(method.name) for method in methods))
    rows.columns[-1].width = len("arXiv:0000.00000")
    for method in methods:
        data = method.data + ("*" if method.published_tuning else "")
        rows.add_row(method.name, method.summary, data, _from(methods, method))
    console = stdout()
    console.print(rows)
    console.print("* the published numbers chose a parameter on labelled data")
    around = table("step", "what it does", "when", "paper")
    for step in steps:
        around.add_row(step.name, step.summary, step.when, _from(steps, step))
    console.print("\nSteps around a method (--before, --after):")
    console.print(around)
    broken = {**methods.broken, **steps.broken}
    if broken:
        console.print("\nInstalled, and cannot be used:")
        console.print(facts(broken.items()))
    console.print("\nNot here:")
    console.print(facts(methods.absent.items()))
    console.print("\n`covmerge methods NAME` shows one: equation, parameters, laws, reference.")


def _from(registry: Registry[Any], shown: Method | Step) -> str:
    if shown.reference is not None:
        return f"arXiv:{shown.reference.arxiv}"
    origin = registry.origin(shown.name)
    return "" if origin is None else str(origin)


def _of_step(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("when", f"{page['when']} a method"),
        ("works on", page["tensors"]),
        ("adapters", page["adapters"]),
        *law_texts(page["laws"]),
    ]


def _of_method(page: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("merges", page["tensors"]),
        ("data", page["data"]),
        *([("tuned", page["published_tuning"])] if page["published_tuning"] else []),
        *law_texts(page["laws"], looks_at_base=page["looks_at_base"]),
        ("equal experts give", page["laws"]["replicas"]),
    ]


def _show(page: Mapping[str, Any], more: Iterable[tuple[str, str]]) -> None:
    """Print a page, with the given additional facts of a method or a step."""
    reference = page["reference"]
    paper = reference and (
        f"{reference['title']}. {reference['venue']}. arXiv:{reference['arxiv']}, "
        f"{reference['equations']}"
    )
    console = stdout()
    console.print(f"{page['name']}: {page['summary']}\n\n  {page['equation']}\n", soft_wrap=True)
    parameters = table("parameter", "allowed", "default", "meaning")
    for parameter in page["parameters"]:
        parameters.add_row(*parameter_row(parameter))
    console.print(parameters if page["parameters"] else "It has no parameters.\n")
    console.print(
        facts(
            [
                *more,
                *([("paper", paper)] if paper else []),
                *([("departs from it", page["departs"])] if page["departs"] else []),
                *([("from", page["from"])] if page["from"] else []),
            ]
        )
    )
    console.print(f"\nOn the command line\n  {page['command']}", soft_wrap=True)
    console.print("\nIn a recipe", *page["recipe"].splitlines(), sep="\n  ", soft_wrap=True)


# `covmerge explain`: the routes for a layer of a given shape, and the cost of each.


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
                "questions": [
                    {
                        "question": choice.question,
                        "taken": choice.taken,
                        "why": choice.why,
                        "routes": _costs_as_json(choice.routes),
                    }
                    for choice in choices
                ],
                "methods": _costs_as_json(costs),
            }
        )
        return
    _show_routes(choices)
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
    rows = table("method", "work", "workspace", right=("work", "workspace"))
    for name, cost in sorted(costs.items(), key=lambda pair: pair[1].flops):
        rows.add_row(name, format_flops(cost.flops), format_size(cost.workspace))
    console.print(rows)


def _costs_as_json(costs: Mapping[str, Cost]) -> dict[str, Any]:
    return {
        name: {"flops": cost.flops, "workspace": cost.workspace} for name, cost in costs.items()
    }


def _show_routes(choices: list[Choice]) -> None:
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
