"""What a report needs beyond covmerge itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from covmerge.base.errors import InputError


@contextmanager
def needed_for_reports() -> Generator[None]:
    """Around imports of the extra: say how to get it.

    Raises:
        InputError: a package is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}: pip install covmerge[report]") from error
