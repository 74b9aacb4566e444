"""The page as a file; matplotlib and Jinja are asked for only when one is written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.stores.disk import replace_file
from covmerge.front.reporting.data import Report

FILE_NAME = "report.html"
_OURS = b'<meta name="generator" content="covmerge '
_HEAD = 2048  # bytes of a page that hold it


def write_html(report: Report, path: Path, *, overwrite: bool = False) -> None:
    """Write the page whole, or leave everything as it was.

    Raises:
        InputError: as `check_page`.
        ResourceError: the disk is full.
    """
    check_page(path, overwrite=overwrite)
    from covmerge.front.reporting.html import render

    replace_file(path, render(report))


def check_page(path: Path, *, overwrite: bool = False) -> None:
    """Check that a page can be written: to a new file, over an earlier page, or with leave.

    Raises:
        InputError: another file is there, or no folder to hold it, or a package is missing.
    """
    check_packages()
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file, such as {path / FILE_NAME}")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}: make it first")
    if overwrite or not path.exists():
        return
    with path.open("rb") as file:
        ours = _OURS in file.read(_HEAD)
    if not ours:
        raise InputError(
            f"{path} exists and is no report of covmerge: pass {Hint('overwrite')} to replace it, or name "
            "another file"
        )


def check_packages() -> None:
    """Check that the packages of a page are there.

    Raises:
        InputError: one is not; it says what to install.
    """
    import_module("covmerge.front.reporting.html")
