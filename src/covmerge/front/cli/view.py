"""`covmerge view`: the flags. What they do is in `viewing`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="OUT|RECIPE.yml", help="Folder that `covmerge merge` wrote, or a recipe file."
        ),
    ],
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="N",
            rich_help_panel=options.RUN,
            help="Port on this machine; 0: one that is free.",
        ),
    ] = 0,
    no_browser: Annotated[
        bool,
        typer.Option(
            "--no-browser", rich_help_panel=options.RUN, help="Print the address, and open nothing."
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
) -> None:
    """Move weights on a page of this machine, and see at once what a merge would keep of each expert.

    covmerge view ./merged

    Reads every matrix once and merges nothing. Only this machine can open the page. Ctrl-C ends it.
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, viewing

    viewing.view(path, flags.shown_options(given), port=port, browser=not no_browser)
