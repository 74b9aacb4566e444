"""What pictures are made from: fonts, textures and emoji, out of packages.

A part of each is for pretraining the base and for nothing else; the tasks have the rest.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image

from covmerge_lab.packages import Package, fetch, fetch_together
from covmerge_lab.vision.canvas import Font

FANCY = Package("debian", "fonts-aenigma", None, "usr/share/fonts")
PLAIN = [
    Package("debian", f"fonts-{name}", None, "usr/share/fonts")
    for name in (
        *(
            "adf-baskervald",
            "adf-berenis",
            "adf-gillius",
            "b612",
            "cabin",
            "cantarell",
            "comfortaa",
        ),
        *("comic-neue", "courier-prime", "crosextra-caladea", "dejavu-core", "dosis", "dustin"),
        *("ebgaramond", "fanwood", "freefont-ttf", "gfs-didot", "jetbrains-mono", "karla", "lato"),
        *("liberation", "linuxlibertine", "oldstandard", "open-sans", "opendyslexic", "play"),
        *("quicksand", "roboto-unhinted", "sil-gentium-basic", "tiresias", "vollkorn"),
    )
]
NOTO = Package("debian", "fonts-noto-core", None, "usr/share/fonts/truetype/noto")
TEXTURES = Package("debian", "openarena-081-textures", None, "usr/share/games/openarena/baseoa")
ARTISTS = ("google", "twitter")
EMOJI = {name: Package("npm", f"emoji-datasource-{name}", "16.0.0", "package") for name in ARTISTS}

KINDS_OF_SURFACE = 40  # textures that are for a task
_CELLS = 4  # a texture is cut into so many rows and columns


def fancy(cache: Path) -> Iterator[tuple[str, Font]]:
    """Go over the fonts of the base: group, font."""
    yield from _fonts(fetch(FANCY, cache))


def plain(cache: Path) -> Iterator[tuple[str, Font]]:
    """Go over the fonts of the tasks: group, font."""
    for folder in fetch_together(PLAIN, cache):
        yield from _fonts(folder)


def _fonts(folder: Path) -> Iterator[tuple[str, Font]]:
    for path in sorted(path for kind in ("ttf", "otf") for path in folder.rglob(f"*.{kind}")):
        yield path.stem[:4].lower(), Font(path)  # a family's styles share the first letters


def noto(cache: Path, name: str) -> Font:
    """Return a font of one writing system."""
    return Font(fetch(NOTO, cache) / f"{name}.ttf")


class Emoji(NamedTuple):
    """One emoji as one company draws it; its group are those that begin with the same character."""

    category: str
    subcategory: str
    group: str
    image: Image.Image


def for_base(group: str) -> bool:
    """Whether an emoji, of this group, is for pretraining: a quarter of them are."""
    return zlib.crc32(group.encode()) % 4 == 0


def emoji(cache: Path, *, base: bool) -> Iterator[Emoji]:
    """Go over all emoji of all artists, in one skin colour."""
    for artist, package in EMOJI.items():
        folder = fetch(package, cache)
        for entry in json.loads((folder / "emoji.json").read_text("utf-8")):
            # A runner, a man running and a woman running are often the very same drawing.
            group = entry["unified"].split("-")[0]
            path = folder / "img" / artist / "64" / entry["image"]
            if path.exists() and entry["category"] != "Component" and for_base(group) == base:
                image = Image.open(path).convert("RGBA")
                yield Emoji(entry["category"], entry["subcategory"], group, image)


def surfaces(cache: Path) -> dict[str, Image.Image]:
    """Return the textures of the task by name."""
    return dict(list(_textures(cache).items())[:KINDS_OF_SURFACE])


def walls(cache: Path) -> dict[str, Image.Image]:
    """Return all other textures by name."""
    return dict(list(_textures(cache).items())[KINDS_OF_SURFACE:])


@lru_cache
def _textures(cache: Path) -> dict[str, Image.Image]:
    """Return one texture of each name, its numbers left off, in a random but fixed order."""
    found: dict[str, Image.Image] = {}
    with zipfile.ZipFile(fetch(TEXTURES, cache) / "pak4-textures.pk3") as archive:
        for path in sorted(archive.namelist()):
            kind = re.sub(r"[\d_]+[a-z]?$", "", Path(path).stem.lower())
            if kind and kind not in found and Path(path).suffix in (".jpg", ".tga"):
                image = Image.open(io.BytesIO(archive.read(path))).convert("RGB")
                if min(image.size) >= 256 and _is_rough(image):
                    found[kind] = image
    return {name: found[name] for name in Random(0).sample(sorted(found), len(found))}


def _is_rough(image: Image.Image) -> bool:
    """Whether there is something to see in every part."""
    return min(float(np.asarray(cell.convert("L")).std()) for cell in cells(image)) >= 8


def cells(image: Image.Image) -> Iterator[Image.Image]:
    """Cut an image into squares; what is left over at its ends is not used."""
    side = min(image.size) // _CELLS
    for row, column in product(range(_CELLS), repeat=2):
        corner = side * column, side * row
        yield image.crop((*corner, corner[0] + side, corner[1] + side))


def patch(image: Image.Image, draw: Random, side: int) -> Image.Image:
    """Cut a square of 32 to 64 pixels out of an image, and make it `side` wide."""
    cut = draw.randint(min(32, *image.size), min(64, *image.size))
    left, top = (draw.randint(0, length - cut) for length in image.size)
    return image.crop((left, top, left + cut, top + cut)).resize((side, side), Image.Resampling.BOX)
