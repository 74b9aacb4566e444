"""`covmerge methods`: the list, or the page of one method."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covmerge.cli.console import print_json, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from covmerge.methods import Method

_DEPARTS = "Departs from the paper:"


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="One method.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the merge methods, or show one: equation, parameters, laws, paper."""
    from covmerge.methods import registry

    if name is not None:
        method = registry.get(name)
        if as_json:
            print_json(_page(method))
        else:
            _show_page(_page(method))
    elif as_json:
        print_json([_page(method) for method in registry])
    else:
        _show_list(list(registry))


def _page(method: Method) -> dict[str, Any]:
    """Everything there is to say about a method, as plain JSON."""
    laws, reference = method.laws, method.reference
    command, recipe = _examples(method)
    return {
        "name": method.name,
        "summary": method.summary,
        "equation": method.equation,
        "takes_any_shape": method.takes_any_shape,
        "parameters": [
            {
                "name": parameter.name,
                "allowed": parameter.annotation,
                "default": parameter.default,
                "description": parameter.description,
                "family_defaults": {
                    family: defaults[parameter.name]
                    for family, defaults in method.family_defaults.items()
                    if parameter.name in defaults
                },
            }
            for parameter in method.parameters
        ],
        "laws": {
            "order_invariant": laws.order_invariant,
            "scale_equivariant": laws.scale_equivariant,
            "replicas": laws.replicas_text,
        },
        "reference": {
            "title": reference.title,
            "venue": reference.venue,
            "arxiv": reference.arxiv,
            "equations": reference.equations,
        },
        "departs": _departures(method),
        "command": command,
        "recipe": recipe,
    }


def _departures(method: Method) -> str:
    """The paragraph of the kernel's docstring that says where it leaves the paper."""
    paragraphs = (inspect.getdoc(method.kernel) or "").split("\n\n")
    own = next(text for text in paragraphs if text.startswith(_DEPARTS))
    return " ".join(own.removeprefix(_DEPARTS).split())


def _examples(method: Method) -> tuple[str, str]:
    """A command and a recipe, with one parameter if the method has one with a value."""
    shown = next((p for p in method.parameters if p.default is not None), None)
    command = f"covmerge merge --base BASE --expert a=A --expert b=B --method {method.name}"
    recipe = f"method: {method.name}"
    if shown is not None:
        value = _yaml(shown.default)
        command += f" --set {shown.name}={value}"
        recipe += f"\nparameters: {{{shown.name}: {value}}}"
    return f"{command} OUT", recipe


def _yaml(value: Any) -> str:
    """Write a value as in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)


def _show_list(methods: list[Method]) -> None:
    from covmerge.cli.show import table

    rows = table("name", "what it does", "paper")
    for method in methods:
        rows.add_row(method.name, method.summary, f"arXiv:{method.reference.arxiv}")
    console = stdout()
    console.print(rows)
    console.print("`covmerge methods NAME` shows one: equation, parameters, laws, reference.")


def _show_page(page: Mapping[str, Any]) -> None:
    from covmerge.cli.show import facts

    laws, reference = page["laws"], page["reference"]
    console = stdout()
    console.print(f"{page['name']}: {page['summary']}\n\n  {page['equation']}\n", soft_wrap=True)
    console.print(_parameters(page) if page["parameters"] else "It has no parameters.\n")
    console.print(
        facts(
            [
                (
                    "merges",
                    "tensors of any shape, element by element"
                    if page["takes_any_shape"]
                    else "matrices (d_out, d_in) of linear layers; other tensors are averaged",
                ),
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
        special = ", ".join(f"{family}: {_yaml(value)}" for family, value in families)
        rows.add_row(
            parameter["name"],
            parameter["allowed"],
            _yaml(parameter["default"]),
            parameter["description"] + (f" ({special})" if special else ""),
        )
    return rows
