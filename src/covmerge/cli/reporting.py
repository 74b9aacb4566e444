"""What `covmerge report` does: read a merge again, and write its page or its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from covmerge import api
from covmerge.checkpoints.manifest import read_manifest
from covmerge.cli.console import print_json, printable, stderr, stdout
from covmerge.cli.progress import progress_on
from covmerge.inspection import SpectraOf
from covmerge.reporting import FILE_NAME, check_page, write_html
from covmerge.reporting.page import summary


@dataclass(frozen=True)
class Flags:
    """The flags that say how to look, and where results go."""

    html: Path | None
    overwrite: bool
    spectra: str
    device: str
    threads: int | None
    max_memory: int | None
    as_json: bool


def report(out: Path, flags: Flags) -> None:
    """Report on an output.

    Raises:
        InputError: not an output of covmerge, or no place for the page.
        CheckFailed: the output fails its verification; the report is there.
    """
    read_manifest(out)  # a wrong folder is told before a missing package
    path = flags.html or (None if flags.as_json else out / FILE_NAME)
    if path is not None:
        check_page(path, overwrite=flags.overwrite)
    found = api.report(
        out,
        spectra=cast("SpectraOf", flags.spectra),
        device=flags.device,
        threads=flags.threads,
        max_memory=flags.max_memory,
        progress=progress_on(stderr()),
    )
    if path is not None:
        write_html(found, path, overwrite=flags.overwrite)
    if flags.as_json:
        print_json(found.as_json())
    else:
        stdout().print(printable(f"{summary(found)}\nReport: {path}"), soft_wrap=True)
    if found.verification is not None:
        found.verification.raise_if_failed()
