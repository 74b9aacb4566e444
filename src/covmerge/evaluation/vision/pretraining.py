"""The base: a small ViT that learns to tell sixteen hundred pictures apart, however they are shown.

Each picture is a class of its own and is seen turned, cut, tinted and on all kinds of ground
("exemplar networks", Dosovitskiy et al. 2014, arXiv:1406.6909). None of them is of a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from covmerge.evaluation import training
from covmerge.evaluation.packages import fetch
from covmerge.evaluation.training import Settings
from covmerge.evaluation.vision import canvas, sources
from covmerge.evaluation.vision.canvas import SIDE, Font, Pixels
from covmerge.evaluation.vision.precision import device, products
from covmerge.evaluation.workers import Tell

# Its annotations are partial.
_Classifier: Any = transformers.ViTForImageClassification
_Config: Any = transformers.ViTConfig

STORED_SIDE = 48
SEED = 7
SETTINGS = Settings(steps=1800, learning_rate=1e-3, batch_size=64, weight_decay=0.05)


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


def collect(cache: Path, quick: bool) -> Pixels:
    """Return the pictures `(n, 4, STORED_SIDE, STORED_SIDE)`, colours and transparency."""
    found = [*glyphs(cache)] if quick else [*glyphs(cache), *icons(cache), *sources.walls(cache)]
    return np.stack([canvas.pixels(canvas.fitted(image, STORED_SIDE)) for image in found])


GLYPHS = {  # what their Unicode names begin with, and the font
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
}
MOST = 50  # of one writing system: a small model has the time to learn some hundreds, not thousands


def glyphs(cache: Path) -> Iterator[Image.Image]:
    """Characters of writing systems that are in no task, white on nothing."""
    for name, file in GLYPHS.items():
        font = Font(fetch(sources.NOTO, cache) / f"{file}-Regular.ttf")
        letters = canvas.letters(name)
        for letter in Random(SEED).sample(letters, min(len(letters), MOST)):
            mask = font.mask(letter)
            if mask is not None:
                yield Image.merge("LA", (Image.new("L", mask.size, 255), mask))


def icons(cache: Path) -> Iterator[Image.Image]:
    """Icons of a desktop, those that are drawn large."""
    for path in sorted(fetch(sources.ICONS, cache).glob("256x256/*/*.png")):
        yield Image.open(path)


class Views:
    """Endless batches of pictures, each shown in another way, and their numbers."""

    def __init__(self, pictures: Pixels, batch_size: int, seed: int) -> None:
        self._pictures: Tensor = torch.as_tensor(pictures)
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            count = len(self._pictures)
            order = torch.randperm(count, generator=self._generator)
            for start in range(0, count, self._batch_size):
                numbers = order[start : start + self._batch_size]
                yield self._show(self._pictures[numbers].float() / 255), numbers

    def _show(self, pictures: Tensor) -> Tensor:
        """Return `(n, 3, SIDE, SIDE)` within [−1, 1] of pictures with transparency."""
        moved = self._moved(torch.cat((pictures[:, :3] * pictures[:, 3:], pictures[:, 3:]), dim=1))
        # Light on dark, as the tasks are: to see the same in both takes a small model long.
        ground, tint = 0.45 * self._draw(len(moved), 3), 1 - 0.45 * self._draw(len(moved), 3)
        shown = moved[:, :3] * tint[..., None, None] + (1 - moved[:, 3:]) * ground[..., None, None]
        shown = shown + 0.02 * torch.randn(shown.shape, generator=self._generator)
        return 2 * shown.clamp(0, 1) - 1

    def _moved(self, pictures: Tensor) -> Tensor:
        count = len(pictures)
        angle = math.radians(15) * (2 * self._draw(count) - 1)
        scale = 0.8 + 0.4 * self._draw(count)
        shift = 0.15 * (2 * self._draw(count, 2) - 1)
        turn = scale[:, None, None] * torch.stack(
            (
                torch.stack((angle.cos(), -angle.sin()), dim=-1),
                torch.stack((angle.sin(), angle.cos()), dim=-1),
            ),
            dim=1,
        )
        grid = affine_grid(
            torch.cat((turn, shift[..., None]), dim=-1), [count, 4, SIDE, SIDE], align_corners=False
        )
        return grid_sample(pictures, grid, align_corners=False)

    def _draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)


def pretrain(pictures: Pixels, settings: Settings, folder: Path, tell: Tell) -> None:
    """Train the base, and save its encoder."""
    torch.default_generator.manual_seed(SEED)
    model = _Classifier(config(len(pictures))).to(device()).train()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        shown, numbers = (each.to(device()) for each in batch)
        with products():
            logits = model(pixel_values=shown).logits
        return cross_entropy(logits.float(), numbers)

    training.fit(model, Views(pictures, settings.batch_size, SEED), loss, settings, tell)
    model.vit.save_pretrained(folder)
