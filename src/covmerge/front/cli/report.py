"""`covmerge report`: the flags. What they do is in `reporting`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `covmerge merge` wrote.")],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=options.OUTPUT, help="The page; else OUT/report.html."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            rich_help_panel=options.OUTPUT,
            help="Replace a file that is no report of covmerge.",
        ),
    ] = False,
    spectra: options.Spectra = "some",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            rich_help_panel=options.RUN,
            help="Print all numbers as one JSON object; a page only with --html.",
        ),
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            rich_help_panel=options.RUN,
            help="Print a table of all layers as comma-separated values; a page only with --html.",
        ),
    ] = False,
) -> None:
    """Say what a merge did, layer by layer, on one page that needs no network.

    covmerge report ./merged

    Reads base, experts and output again. Exits with 1 if the output fails its verification.
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, reporting

    reporting.report(
        out,
        flags.shown_options(given),
        spectra=spectra,
        html=html,
        as_json=as_json,
        as_csv=as_csv,
    )
