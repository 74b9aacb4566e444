"""`covmerge view`: measure, and serve the page until it is interrupted."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from covmerge.base.threads import start
from covmerge.front.cli import options
from covmerge.front.cli.console import stdout


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
    import webbrowser

    from covmerge.files.stores.address import local_path
    from covmerge.front.cli import flags
    from covmerge.front.viewer import Server, ViewJob

    scene = ViewJob(local_path(path), flags.shown_options(given)).run()
    with closing(Server(scene, port)) as server:
        stdout().print(
            f"{server.url}\nThis machine alone can open it. Ctrl-C ends it.", soft_wrap=True
        )
        if not no_browser:
            # A browser of the terminal would keep this thread.
            start(threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True))
        try:
            server.serve()
        except KeyboardInterrupt:
            stdout().print("ended")
