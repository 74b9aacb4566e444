"""Commands on an output: `covmerge verify`, `report`, `view`, `push`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import (
    check_one_form,
    print_csv,
    print_json,
    printable,
    say,
    stdout,
    table,
)

if TYPE_CHECKING:
    from covmerge.run.inspection.job import SpectraOf
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
        from covmerge.run.verification import Check

        lacking = Check("recomputed", ok=True, detail="not compared: coverage failed", made=False)
        again = lacking if "coverage" in report.failed else recompute(out, tensors=tensors)
        report = replace(report, checks=(*report.checks, again))
    if as_json:
        print_json(report.summary())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _show(report: Verification) -> None:
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


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `covmerge merge` wrote.")],
    html: Annotated[
        Path | None, options.flag(options.OUTPUT, "FILE", "The page; else OUT/report.html.")
    ] = None,
    overwrite: Annotated[
        bool,
        options.flag(
            options.OUTPUT, None, "Replace a file that is no report of covmerge.", "--overwrite"
        ),
    ] = False,
    spectra: options.Spectra = "some",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    as_json: Annotated[
        bool,
        options.flag(
            options.RUN,
            None,
            "Print all numbers as one JSON object; a page only with --html.",
            "--json",
        ),
    ] = False,
    as_csv: Annotated[
        bool,
        options.flag(
            options.RUN,
            None,
            "Print a table of all layers as comma-separated values; a page only with --html.",
            "--csv",
        ),
    ] = False,
) -> None:
    """Report what a merge did, layer by layer, on one page that needs no network.

    covmerge report ./merged

    Reads base, experts and output again. Exits with 1 if the output fails its verification.
    """
    given = options.given(locals())
    check_one_form(as_json=as_json, as_csv=as_csv)
    from covmerge.files.checkpoints.manifest import read_manifest
    from covmerge.files.stores.address import local_path
    from covmerge.front.cli import flags
    from covmerge.front.reporting.job import FILE_NAME, ReportJob, check_page, write_html
    from covmerge.front.reporting.page import summary

    how = flags.shown_options(given)
    read_manifest(local_path(out))  # report a wrong folder before a missing package
    path = html or (None if as_json or as_csv else out / FILE_NAME)
    if path is not None:
        check_page(path, overwrite=overwrite)
    found = ReportJob(out, cast("SpectraOf", spectra), how).run()
    if path is not None:
        write_html(found, path, overwrite=overwrite)
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        print_csv(found)
    else:
        stdout().print(printable(f"{summary(found)}\nReport: {path}"), soft_wrap=True)
    if found.verification is not None:
        found.verification.raise_if_failed()


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="OUT|RECIPE.yml", help="Folder that `covmerge merge` wrote, or a recipe file."
        ),
    ],
    html: Annotated[
        Path | None,
        options.flag(
            options.OUTPUT, "FILE", "The page; else view.html in OUT, or beside the recipe."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        options.flag(options.OUTPUT, None, "Replace a file that is no such page.", "--overwrite"),
    ] = False,
    no_browser: Annotated[
        bool, options.flag(options.OUTPUT, None, "Do not open the page.", "--no-browser")
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
) -> None:
    """Write a page where you move weights, and see at once what a merge would keep of each expert.

    covmerge view ./merged

    Reads every matrix once and merges nothing.
    """
    given = options.given(locals())
    import webbrowser

    from covmerge.files.stores.address import local_path
    from covmerge.front.cli import flags
    from covmerge.front.viewer import FILE_NAME, ViewJob, check_page, write_html

    source = local_path(path)
    page = html or (source if source.is_dir() else source.parent) / FILE_NAME
    check_page(page, overwrite=overwrite)
    write_html(ViewJob(source, flags.shown_options(given)).run(), page, overwrite=overwrite)
    stdout().print(printable(f"Page: {page}"), soft_wrap=True)
    if not no_browser:
        webbrowser.open(page.absolute().as_uri())


def push(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder that `covmerge merge` wrote.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository; it is made if there is none.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Let nobody else see the repository.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch; it is made if there is none.")
    ] = None,
    message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Message of the commit.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Push an output to the Hugging Face Hub, in one commit, if it passes its verification.

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
