"""`covmerge methods`: the list of methods and steps, or the page of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.front.cli.catalogue import law_texts, markdown, page, show_value, step_page
from covmerge.front.cli.console import print_json, say, stdout

if TYPE_CHECKING:
    from rich.table import Table

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
    elif name is not None and name in steps and name not in registry:
        shown = step_page(steps.get(name))
        if as_json:
            print_json(shown)
        else:
            _show_step(shown)
    elif name is not None:
        method = registry.get(name)
        if as_json:
            print_json(page(method))
        else:
            _show_page(page(method))
    elif as_json:
        print_json([page(method) for method in registry])
        for why in (*registry.broken.values(), *steps.broken.values()):
            say("warning", why)
    else:
        _show_list(registry, steps)


_LONGEST = 30  # letters of a name that stand on one line


def _show_list(methods: Registry[Method], steps: Registry[Step]) -> None:
    from covmerge.front.cli.show import facts, table

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
    """The paper that something is from, or the package."""
    if shown.reference is not None:
        return f"arXiv:{shown.reference.arxiv}"
    origin = registry.origin(shown.name)
    return "" if origin is None else str(origin)


def _show_step(page: Mapping[str, Any]) -> None:
    _show(
        page,
        [
            ("when", f"{page['when']} a method"),
            ("works on", page["tensors"]),
            ("adapters", page["adapters"]),
            *law_texts(page["laws"]),
        ],
    )


def _show_page(page: Mapping[str, Any]) -> None:
    laws = page["laws"]
    _show(
        page,
        [
            ("merges", page["tensors"]),
            ("data", page["data"]),
            *([("tuned", page["published_tuning"])] if page["published_tuning"] else []),
            *law_texts(laws, looks_at_base=page["looks_at_base"]),
            ("equal experts give", laws["replicas"]),
        ],
    )


def _show(page: Mapping[str, Any], more: Iterable[tuple[str, str]]) -> None:
    """Print a page, with the facts that methods or steps have of their own."""
    from covmerge.front.cli.show import facts

    reference = page["reference"]
    paper = reference and (
        f"{reference['title']}. {reference['venue']}. arXiv:{reference['arxiv']}, "
        f"{reference['equations']}"
    )
    console = stdout()
    console.print(f"{page['name']}: {page['summary']}\n\n  {page['equation']}\n", soft_wrap=True)
    console.print(_parameters(page) if page["parameters"] else "It has no parameters.\n")
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


def _parameters(page: Mapping[str, Any]) -> Table:
    from covmerge.front.cli.show import table

    rows = table("parameter", "allowed", "default", "meaning")
    for parameter in page["parameters"]:
        families = parameter.get("family_defaults", {}).items()
        special = ", ".join(f"{family}: {show_value(value)}" for family, value in families)
        rows.add_row(
            parameter["name"],
            parameter["allowed"],
            show_value(parameter["default"]),
            parameter["description"] + (f" ({special})" if special else ""),
        )
    return rows
