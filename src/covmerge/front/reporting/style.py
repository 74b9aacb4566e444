"""Numbers, names and colours in the form of a report, and the packages that a report needs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

from covmerge.base.errors import InputError
from covmerge.base.text import printable

# The form of numbers and names in a report.

_MINUS = "\u2212"  # screen readers skip a hyphen
NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with the given significant digits.

    Example:
        >>> number(0.012345), number(-1234.5), number(999.7), number(None), number(float("inf"))
        ('0.0123', '−1234', '1000', '–', '∞')
    """
    if value is None or value != value:
        return NOTHING
    if not isfinite(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    # From 999.5 on, three digits would be written as 1e+03.
    text = f"{value:.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"
    return text.replace("-", _MINUS)


def share(value: float | None) -> str:
    """Format a share as a percentage.

    Example:
        >>> share(0.123), share(-6.07), share(0.00123), share(0.999)
        ('12%', '−607%', '0.12%', '100%')
    """
    return NOTHING if value is None else f"{number(100 * value, 2)}%"


def cosine(value: float | None) -> str:
    """Format a cosine.

    Example:
        >>> cosine(0.1), cosine(-0.286), cosine(None)
        ('0.10', '−0.29', '–')
    """
    return NOTHING if value is None else f"{value:.2f}".replace("-", _MINUS)


def quoted(name: str) -> str:
    """Return an expert's name in quotation marks, shortened."""
    return f"'{shorten(name, 40)}'"


def shorten(name: str, limit: int) -> str:
    """Shorten a name but keep both ends, because names differ there.

    Example:
        >>> shorten("meta-llama-3-8b-instruct-math-v1", 16)
        'meta-ll…-math-v1'
    """
    name = printable(name).replace("\n", " ")
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


# The colours of pages and pictures.


@dataclass(frozen=True)
class Colour:
    """A colour on a light background, and its counterpart on a dark background."""

    light: str
    dark: str


PAPER = Colour("#fefefe", "#15181c")
INK = Colour("#1b1f24", "#e6e9ec")
MUTED = Colour("#5b6570", "#a4aeb8")
RULE = Colour("#d3d8dd", "#3a424a")
# These two are told apart by all kinds of colour vision, and by their lightness in print.
BLUE = Colour("#1d5a9e", "#7db5f0")
ORANGE = Colour("#b5541b", "#f09a5f")
COLOURS: Mapping[str, Colour] = {
    "paper": PAPER,
    "ink": INK,
    "muted": MUTED,
    "rule": RULE,
    "blue": BLUE,
    "orange": ORANGE,
}


# The packages that a report needs beyond covmerge's.


@contextmanager
def needed_for_reports() -> Generator[None]:
    """Turn a missing package into an error that says how to install it; for imports of the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}: pip install covmerge[report]") from error
