"""What `covmerge view` does: measure, and serve the page until it is interrupted."""

from __future__ import annotations

import threading
import webbrowser
from contextlib import closing
from pathlib import Path

from covmerge.base.threads import start
from covmerge.files.stores.address import local_path
from covmerge.front.cli.console import stdout
from covmerge.front.viewer import Server, ViewJob
from covmerge.run.engine.options import RunOptions


def view(path: Path, options: RunOptions, *, port: int, browser: bool) -> None:
    """Serve the page of an output, or of a recipe.

    Raises:
        InputError: nothing that can be weighed, or a port that cannot be listened on.
    """
    scene = ViewJob(local_path(path), options).run()
    with closing(Server(scene, port)) as server:
        stdout().print(
            f"{server.url}\nThis machine alone can open it. Ctrl-C ends it.", soft_wrap=True
        )
        if browser:
            # A browser of the terminal would keep this thread.
            start(threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True))
        try:
            server.serve()
        except KeyboardInterrupt:
            stdout().print("ended")
