"""`covmerge schema`."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from covmerge.plan.recipe import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
