"""`covmerge verify`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covmerge.front.cli.console import print_json, printable, stdout

if TYPE_CHECKING:
    from covmerge.run.verification import Verification


def verify(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder that `covmerge merge` wrote, or its address."),
    ],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Compute some tensors again from the sources, by float64 reference implementations.",
        ),
    ] = False,
    tensors: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="How many --deep computes again, evenly.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Re-read an output and check it: hashes, coverage, finite values, copies, heads.

    Exits with 1 if a check failed, with 2 if the folder is no output of covmerge, or --deep lacks a
    source.
    """
    from covmerge.run.verification import verify as check

    report = check(out)
    if deep:
        from covmerge.run.recompute import recompute

        report = replace(report, checks=(*report.checks, recompute(out, tensors=tensors)))
    if as_json:
        print_json(report.summary())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _show(report: Verification) -> None:
    from covmerge.front.cli.show import table

    checks = table("check", "result", "detail")
    for check in report.checks:
        checks.add_row(
            check.name,
            check.result,
            printable(check.detail),
            style="red" if not check.ok else "yellow" if check.noted else None,
        )
    console = stdout()
    console.print(checks)
    console.print(f"{printable(str(report.folder))}: {report.verdict}", soft_wrap=True)
