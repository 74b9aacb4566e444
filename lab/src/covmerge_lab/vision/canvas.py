"""Drawing: every picture of the suite is an array `(channels, SIDE, SIDE)` of bytes."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

SIDE = 32
Pixels = NDArray[np.uint8]
Color = tuple[int, int, int]

_FONT_SIZE = 48  # drawn large, then made smaller
_UNASSIGNED = "\U0010ffff"  # no font has it: what it is drawn as stands for what is missing


class Font:
    """Draws characters as masks cut to their ink."""

    def __init__(self, path: Path) -> None:
        self._font = ImageFont.truetype(str(path), _FONT_SIZE)
        self._missing = self._ink(_UNASSIGNED)

    def mask(self, text: str) -> Image.Image | None:
        """Return a text in white on black, or None where the font has no such character."""
        found = self._ink(text)
        if found is None or (self._missing and found.tobytes() == self._missing.tobytes()):
            return None
        return found

    def _ink(self, text: str) -> Image.Image | None:
        raw: Any = self._font.getmask(text, mode="L")
        drawn = Image.frombytes("L", raw.size, bytes(raw))
        box = drawn.getbbox()
        return drawn.crop(box) if box else None


@lru_cache
def letters(name: str) -> tuple[str, ...]:
    """Return all letters whose Unicode name begins so."""
    found = (c for c in map(chr, range(0x20000)) if unicodedata.category(c).startswith("L"))
    return tuple(c for c in found if unicodedata.name(c, "").startswith(name))


def scattered(mask: Image.Image, draw: Random) -> Image.Image:
    """Return a mask a little turned, almost as large as the picture, somewhere in it."""
    turned = mask.rotate(draw.uniform(-8, 8), resample=Image.Resampling.BILINEAR, expand=True)
    scale = draw.uniform(0.8, 0.95) * SIDE / max(turned.size)
    width, height = (max(2, round(side * scale)) for side in turned.size)
    room = draw.randint(-2, 2), draw.randint(-2, 2)
    corner = (SIDE - width) // 2 + room[0], (SIDE - height) // 2 + room[1]
    picture = Image.new("L", (SIDE, SIDE))
    picture.paste(turned.resize((width, height), Image.Resampling.BOX), corner)
    return picture


def colors(draw: Random) -> tuple[Color, Color]:
    """Return a light and a dark colour."""
    return _color(draw, 140, 255), _color(draw, 0, 110)


def _color(draw: Random, least: int, most: int) -> Color:
    return draw.randint(least, most), draw.randint(least, most), draw.randint(least, most)


def painted(mask: Image.Image, color: Color, ground: Color | Image.Image) -> Image.Image:
    """Return a colour seen through a mask, on another colour or on a picture."""
    if isinstance(ground, tuple):
        ground = Image.new("RGB", mask.size, ground)
    return Image.composite(Image.new("RGB", mask.size, color), ground, mask)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Return a picture, its transparency kept, with its longer side made `side`, in the middle."""
    scale = side / max(image.size)
    width, height = (max(1, round(length * scale)) for length in image.size)
    canvas = Image.new("RGBA", (side, side))
    corner = (side - width) // 2, (side - height) // 2
    canvas.paste(image.convert("RGBA").resize((width, height), Image.Resampling.BOX), corner)
    return canvas


def flat(image: Image.Image, ground: Color) -> Image.Image:
    """Return a picture without transparency."""
    return Image.alpha_composite(Image.new("RGBA", image.size, (*ground, 255)), image).convert(
        "RGB"
    )


def pixels(image: Image.Image) -> Pixels:
    """Return a picture as `(channels, height, width)`."""
    return np.stack([np.asarray(channel, dtype=np.uint8) for channel in image.split()])
