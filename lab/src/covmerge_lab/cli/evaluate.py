"""`covmerge evaluate`: a model put to a harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import print_json, printable, stdout, table

if TYPE_CHECKING:
    from covmerge_lab.record import Result

_WHAT = "What to measure"


def evaluate(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of a model, or of an adapter.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...", rich_help_panel=_WHAT, help="Tasks, groups or tags of lm-eval."
        ),
    ],
    harness: Annotated[
        str, typer.Option(metavar="lm-eval", rich_help_panel=_WHAT, help="Who measures.")
    ] = "lm-eval",
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=_WHAT, help="Folder with definitions of your own tasks."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_WHAT,
            help="Most examples of a task, for a first look.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", rich_help_panel=options.RUN, help="Examples at a time."),
    ] = 8,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda[:i]",
            rich_help_panel=options.RUN,
            help="Where the model runs; else a GPU, if there is one.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a model, and write the results beside it: evaluation.json and its model card.

    covmerge evaluate ./merged --harness lm-eval --tasks arc_easy,gsm8k
    """
    from covmerge.run.engine.devices import usable_device
    from covmerge_lab.harness import evaluate as measure

    results = measure(
        out,
        tasks=[name.strip() for name in tasks.split(",") if name.strip()],
        harness=harness,
        limit=limit,
        include_path=include_path,
        batch_size=batch_size,
        device=None if device is None else str(usable_device(device)),
    )
    if as_json:
        print_json({"results": [result.summary() for result in results]})
    else:
        _show(out, results)


def _show(out: Path, results: Sequence[Result]) -> None:
    rows = table("task", "metric", "value", "examples", right=("value", "examples"))
    for result in results:
        for metric in result.metrics:
            count = "" if result.examples is None else str(result.examples)
            rows.add_row(printable(result.task), metric.name, str(metric), count)
    console = stdout()
    console.print(rows)
    console.print(
        f"{printable(str(out))}: written to evaluation.json and README.md", soft_wrap=True
    )
