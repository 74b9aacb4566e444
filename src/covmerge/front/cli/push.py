"""`covmerge push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import print_json, printable, say, stdout


def push(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `covmerge merge` wrote.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository; it is made if there is none.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Let nobody else see the repository.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Branch; it is made if there is none."),
    ] = None,
    message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Message of the commit.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Put an output on the Hugging Face Hub, in one commit, if it passes its verification.

    covmerge push ./merged org/name

    Exits with 1 if a check failed, with 2 if the folder is no finished output or the Hub refuses.
    """
    from covmerge.front.publish import prepare

    publication = prepare(out, repository, message=message)
    for note in publication.notes:  # before anything is sent
        say("note", note)
    done = publication.send(private=private, revision=revision)
    if as_json:
        print_json(done.summary())
        return
    console = stdout()
    console.print(f"Pushed {len(done.files)} files of {printable(str(out))}:", soft_wrap=True)
    console.print(printable(done.url), soft_wrap=True)
