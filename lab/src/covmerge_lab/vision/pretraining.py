"""The base: a small ViT that learns to name thousands of pictures, however they are shown.

What it sees are characters of fonts, writing systems, textures and emoji that no task has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_letters, digits
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from covmerge_lab import training
from covmerge_lab.training import Settings, device, products
from covmerge_lab.vision import canvas, materials
from covmerge_lab.vision.canvas import SIDE, Font, Pixels
from covmerge_lab.vision.views import moved
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_Classifier: Any = transformers.ViTForImageClassification
_Config: Any = transformers.ViTConfig

STORED_SIDE = 48
SEED = 7
SETTINGS = Settings(steps=3000, learning_rate=1e-3, batch_size=64, weight_decay=0.05)


def config(labels: int) -> Any:
    """Return the architecture, 2.7 million parameters: it sees a picture as sixteen patches."""
    return _Config(
        image_size=SIDE,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=labels,
        initializer_range=0.07,  # about 1 / √192: with the usual 0.02 a narrow model hardly starts
    )


class Named(NamedTuple):
    """A picture with transparency, and what it is called."""

    image: Image.Image
    name: str


@dataclass(frozen=True)
class Pictures:
    """What the base is pretrained on.

    Attributes:
        pixels: `(n, 4, STORED_SIDE, STORED_SIDE)`, colours and transparency.
        labels: the number of each one's name.
        weights: how often each is drawn: the sources are seen equally often.
    """

    pixels: Pixels
    labels: NDArray[np.int64]
    weights: NDArray[np.float64]


def collect(cache: Path, quick: bool) -> Pictures:
    """Return all pictures, or those of one source."""
    readers = (systems,) if quick else (systems, characters, walls, emoji)
    sources = [[*reader(cache, Random(SEED))] for reader in readers]
    found = [named for source in sources for named in source]
    names = sorted({named.name for named in found})
    return Pictures(
        np.stack([canvas.pixels(canvas.fitted(named.image, STORED_SIDE)) for named in found]),
        np.array([names.index(named.name) for named in found]),
        np.array([1 / len(source) for source in sources for _ in source]),
    )


SYSTEMS = {  # what the Unicode names of their letters begin with, and the font
    "TANGUT IDEOGRAPH": "NotoSerifTangut",
    "YI SYLLABLE": "NotoSansYi",
    "CUNEIFORM SIGN": "NotoSansCuneiform",
    "EGYPTIAN HIEROGLYPH": "NotoSansEgyptianHieroglyphs",
    "ANATOLIAN HIEROGLYPH": "NotoSansAnatolianHieroglyphs",
    "BAMUM LETTER": "NotoSansBamum",
    "VAI SYLLABLE": "NotoSansVai",
    "LINEAR A SIGN": "NotoSansLinearA",
    "LINEAR B SYLLABLE": "NotoSansLinearB",
    "MENDE KIKAKUI SYLLABLE": "NotoSansMendeKikakui",
    "CANADIAN SYLLABICS": "NotoSansCanadianAboriginal",
    "CHEROKEE LETTER": "NotoSansCherokee",
    "RUNIC LETTER": "NotoSansRunic",
    "TIFINAGH LETTER": "NotoSansTifinagh",
    "BENGALI": "NotoSansBengali",
    "GUJARATI": "NotoSansGujarati",
    "KANNADA": "NotoSansKannada",
    "MALAYALAM": "NotoSansMalayalam",
    "MYANMAR": "NotoSansMyanmar",
    "SINHALA": "NotoSansSinhala",
}


def systems(cache: Path, draw: Random) -> Iterator[Named]:
    """Letters of writing systems that are in no task; the system is to be named."""
    for name, file in SYSTEMS.items():
        font = materials.noto(cache, f"{file}-Regular")
        letters = canvas.letters(name)
        for letter in draw.sample(letters, min(len(letters), 100)):
            yield from _cut_out(font, letter, name)


def characters(cache: Path, draw: Random) -> Iterator[Named]:
    """Latin letters, small and capital, and digits, in fancy fonts."""
    for _, font in materials.fancy(cache):
        for character in ascii_letters + digits:
            yield from _cut_out(font, character, character.upper())


def _cut_out(font: Font, text: str, name: str) -> Iterator[Named]:
    mask = font.mask(text)
    if mask is not None:
        yield Named(Image.merge("LA", (Image.new("L", mask.size, 255), mask)), name)


def walls(cache: Path, draw: Random) -> Iterator[Named]:
    """Patches of textures; the texture is to be named."""
    for name, image in materials.walls(cache).items():
        for _ in range(8):
            yield Named(materials.patch(image, draw, STORED_SIDE), f"wall {name}")


def emoji(cache: Path, draw: Random) -> Iterator[Named]:
    """Emoji; their subcategory is to be named."""
    for each in materials.emoji(cache, base=True):
        yield Named(each.image, f"emoji {each.subcategory}")


class Views:
    """Endless batches of pictures, each shown in another way, and their labels."""

    def __init__(self, pictures: Pictures, batch_size: int, seed: int) -> None:
        self._pixels = torch.as_tensor(pictures.pixels)
        self._labels = torch.as_tensor(pictures.labels)
        self._weights = torch.as_tensor(pictures.weights)
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            drawn = torch.multinomial(
                self._weights, self._batch_size, replacement=True, generator=self._generator
            )
            yield self._show(self._pixels[drawn].float() / 255), self._labels[drawn]

    def _show(self, pictures: Tensor) -> Tensor:
        """Return `(n, 3, SIDE, SIDE)` within [−1, 1] of pictures with transparency."""
        seen = torch.cat((pictures[:, :3] * pictures[:, 3:], pictures[:, 3:]), dim=1)
        seen = moved(seen, self._generator, most=0.17, padding="zeros")
        # Light on dark, as the tasks are: to see the same in both takes a small model long.
        ground, tint = 0.45 * self._draw(len(seen), 3), 1 - 0.45 * self._draw(len(seen), 3)
        shown = seen[:, :3] * tint[..., None, None] + (1 - seen[:, 3:]) * ground[..., None, None]
        shown = shown + 0.02 * torch.randn(shown.shape, generator=self._generator)
        return 2 * shown.clamp(0, 1) - 1

    def _draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)


def pretrain(pictures: Pictures, settings: Settings, folder: Path, on_progress: OnProgress) -> None:
    """Train the base, and save its encoder."""
    torch.default_generator.manual_seed(SEED)
    model = _Classifier(config(int(pictures.labels.max()) + 1)).to(device()).train()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        shown, labels = (each.to(device()) for each in batch)
        with products():
            logits = model(pixel_values=shown).logits
        return cross_entropy(logits.float(), labels)

    training.fit(model, Views(pictures, settings.batch_size, SEED), loss, settings, on_progress)
    model.config.num_labels = 2  # transformers' default, which is not written: the names are gone
    model.vit.save_pretrained(folder)
