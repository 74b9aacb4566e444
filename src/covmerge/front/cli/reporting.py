"""What `covmerge report` does: read a merge again, and write its page or its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from covmerge.files.checkpoints.manifest import read_manifest
from covmerge.files.stores.address import local_path
from covmerge.front.cli.console import check_one_form, print_csv, print_json, printable, stdout
from covmerge.front.reporting import FILE_NAME, ReportJob, check_page, write_html
from covmerge.front.reporting.page import summary
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import SpectraOf


def report(
    out: Path,
    options: RunOptions,
    *,
    spectra: str,
    html: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Report on an output.

    Raises:
        InputError: not an output of covmerge, or no place for the page.
        CheckFailed: the output fails its verification; the report is there.
    """
    check_one_form(as_json=as_json, as_csv=as_csv)
    read_manifest(local_path(out))  # a wrong folder is reported before a missing package
    path = html or (None if as_json or as_csv else out / FILE_NAME)
    if path is not None:
        check_page(path, overwrite=options.overwrite)
    job = ReportJob(out, spectra=cast("SpectraOf", spectra), options=options)
    found = job.run()
    if path is not None:
        write_html(found, path, overwrite=options.overwrite)
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        print_csv(found)
    else:
        stdout().print(printable(f"{summary(found)}\nReport: {path}"), soft_wrap=True)
    if found.verification is not None:
        found.verification.raise_if_failed()
