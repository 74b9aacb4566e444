"""`covmerge methods`: the list, or the page of one method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.cli.catalogue import markdown, page, show_value
from covmerge.cli.console import print_json, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from covmerge.methods import Method


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="One method.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all pages as Markdown: docs/methods.md.")
    ] = False,
) -> None:
    """List the merge methods, or show one: equation, parameters, laws, paper."""
    from covmerge.methods import registry

    if as_markdown:
        typer.echo(markdown(registry, registry.absent.items()), nl=False)
    elif name is not None:
        method = registry.get(name)
        if as_json:
            print_json(page(method))
        else:
            _show_page(page(method))
    elif as_json:
        print_json([page(method) for method in registry])
    else:
        _show_list(list(registry), registry.absent)


def _show_list(methods: list[Method], absent: Mapping[str, str]) -> None:
    from covmerge.cli.show import facts, table

    rows = table("name", "what it does", "data", "paper")
    for method in methods:
        data = method.data + ("*" if method.published_tuning else "")
        rows.add_row(method.name, method.summary, data, f"arXiv:{method.reference.arxiv}")
    console = stdout()
    console.print(rows)
    console.print("* the published numbers chose a parameter on labelled data")
    console.print("\nNot here:")
    console.print(facts(absent.items()))
    console.print("\n`covmerge methods NAME` shows one: equation, parameters, laws, reference.")


def _show_page(page: Mapping[str, Any]) -> None:
    from covmerge.cli.show import facts

    laws, reference = page["laws"], page["reference"]
    console = stdout()
    console.print(f"{page['name']}: {page['summary']}\n\n  {page['equation']}\n", soft_wrap=True)
    console.print(_parameters(page) if page["parameters"] else "It has no parameters.\n")
    console.print(
        facts(
            [
                ("merges", page["tensors"]),
                ("data", page["data"]),
                *([("tuned", page["published_tuning"])] if page["published_tuning"] else []),
                (
                    "order of experts",
                    "changes nothing" if laws["order_invariant"] else "changes the result",
                ),
                (
                    "updates times s",
                    "give the merged update times s"
                    if laws["scale_equivariant"]
                    else "do not give the merged update times s: the absolute scale matters",
                ),
                (
                    "rotations",
                    "of all updates rotate the merged update"
                    if laws["rotation_equivariant"]
                    else "of all updates change the result: the axes matter",
                ),
                ("equal experts give", laws["replicas"]),
                (
                    "paper",
                    f"{reference['title']}. {reference['venue']}. arXiv:{reference['arxiv']}, "
                    f"{reference['equations']}",
                ),
                ("departs from it", page["departs"]),
            ]
        )
    )
    console.print(f"\nOn the command line\n  {page['command']}", soft_wrap=True)
    console.print("\nIn a recipe", *page["recipe"].splitlines(), sep="\n  ", soft_wrap=True)


def _parameters(page: Mapping[str, Any]) -> Table:
    from covmerge.cli.show import table

    rows = table("parameter", "allowed", "default", "meaning")
    for parameter in page["parameters"]:
        families = parameter["family_defaults"].items()
        special = ", ".join(f"{family}: {show_value(value)}" for family, value in families)
        rows.add_row(
            parameter["name"],
            parameter["allowed"],
            show_value(parameter["default"]),
            parameter["description"] + (f" ({special})" if special else ""),
        )
    return rows
