"""Paper and ink of pages and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """A colour on light paper, and what it becomes on dark paper."""

    light: str
    dark: str


PAPER = Colour("#fefefe", "#15181c")
INK = Colour("#1b1f24", "#e6e9ec")
MUTED = Colour("#5b6570", "#a4aeb8")
RULE = Colour("#d3d8dd", "#3a424a")
# Told apart by every kind of colour vision, and by their lightness in print.
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
