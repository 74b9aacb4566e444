"""Pictures of dead leaves, which have the edges and the spectrum that natural pictures have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.json_file import read_object
from covmerge.plan.statistics.examples import Batch, Reading

if TYPE_CHECKING:
    from covmerge.plan.statistics.model import RunningModel

_PREPROCESSOR = "preprocessor_config.json"
_MOST_VALUES = 2**26  # of one picture; real ones have 2**20
_SMALLEST, _LARGEST = 0.02, 0.5  # radii, of a picture's longer side, and a pixel at least
_AT_ONCE = 64  # leaves that are drawn; a large picture has about 1,500
_PIXELS = 2**16  # that are held against all of them


@dataclass(frozen=True)
class Leaves:
    """Discs of one colour each that hide one another, in the range that the model's pixels have.

    Discs of radius r fall with a density r⁻³, so that objects of all sizes are seen alike from near
    and from far: the spectrum is that of natural pictures, about 1/f, and so are the edges, which
    noise of that spectrum lacks (Lee, Mumford and Huang 2001, §4; what a network learns from such
    pictures: Baradad et al. 2021, §3).

    Attributes:
        seed: of what is drawn.
        shared: whether all experts are shown the same.
    """

    shared: ClassVar[bool] = True

    seed: int = 0

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        """What a statistics file says of it."""
        return {"kind": "dead leaves", "seed": self.seed}

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches of pictures `(batch, channels, height, width)`.

        Raises:
            InputError: the config does not say how large pictures are, or what normalises their
                pixels is malformed.
        """
        source, folder = model.checkpoint.source, model.checkpoint.folder
        if reading.tokenizer is not None or reading.max_length is not None:
            raise InputError(
                f"{source} takes pictures: leave out {Hint('tokenizer')} and {Hint('max_length')}, which "
                "are for texts"
            )
        shape = _shape(model.whole.config, source)
        low, high = _range(folder, shape[0])
        draw = torch.Generator().manual_seed(self.seed)
        for first in range(0, reading.wanted, reading.at_once):
            count = min(reading.at_once, reading.wanted - first)
            pictures = torch.stack([_picture(shape, draw) for _ in range(count)])
            yield {"pixel_values": low + (high - low) * (pictures + 1.0) / 2.0}


def _picture(shape: tuple[int, int, int], draw: torch.Generator) -> Tensor:
    """Return one picture within [-1, 1]: the leaf on top is laid first, until nothing is bare."""
    channels, height, width = shape
    side = max(height, width)
    least, most = max(_SMALLEST * side, 1.0), max(_LARGEST * side, 1.0)
    picture, bare = torch.empty(channels, height * width), torch.arange(height * width)
    while len(bare):
        leaves = torch.rand(_AT_ONCE, 3 + channels, generator=draw)
        # The square of r is inverse where r⁻³ is the density.
        radius = (most**-2 + leaves[:, :1] * (least**-2 - most**-2)).rsqrt()
        down = leaves[:, 1:2] * (height + 2.0 * radius) - radius
        across = leaves[:, 2:3] * (width + 2.0 * radius) - radius
        still: list[Tensor] = []
        for pixels in torch.split(bare, _PIXELS):
            row = pixels // width
            away = (row - down).square() + (pixels - width * row - across).square()
            covers = away <= radius.square()
            hidden = covers.any(0)
            top = covers.byte().argmax(0)[hidden]  # the first of several
            picture[:, pixels[hidden]] = 2.0 * leaves[top, 3:].mT - 1.0
            still.append(pixels[~hidden])
        bare = torch.cat(still)
    return picture.view(shape)


def _shape(config: Any, source: str) -> tuple[int, int, int]:
    """Channels, height and width of what the model takes."""
    size: Any = getattr(config, "image_size", None)
    sides: list[Any] = [*size] if isinstance(size, list | tuple) else [size, size]
    shape = [getattr(config, "num_channels", 3), *sides]
    if len(shape) != 3 or not all(isinstance(side, int) and side > 0 for side in shape):
        raise InputError(
            f"the config of {source} does not say how large its pictures are (image_size is {size}): "
            "pass batches from Python"
        )
    if prod(shape) > _MOST_VALUES:
        raise InputError(
            f"{source} takes pictures of {' × '.join(map(str, shape))} values, more than any model "
            "does: is its config damaged?"
        )
    return shape[0], shape[1], shape[2]


def _range(folder: Path | None, channels: int) -> tuple[Tensor, Tensor]:
    """Darkest and brightest pixel of each channel, `(channels, 1, 1)`; -1 and 1 where nobody says."""
    path = None if folder is None else folder / _PREPROCESSOR
    if path is None or not path.is_file():
        return torch.tensor(-1.0), torch.tensor(1.0)
    found = read_object(path)
    brightest = 255.0
    if found.get("do_rescale", True):
        brightest *= _numbers(found, "rescale_factor", 1 / 255, 1, path)[0]
    mean, deviation = (
        torch.tensor(_numbers(found, name, neutral, channels, path))[:, None, None]
        if found.get("do_normalize", True)
        else torch.tensor(neutral)
        for name, neutral in (("image_mean", 0.0), ("image_std", 1.0))
    )
    if not bool((deviation > 0).all()):
        raise InputError(f"{path}: image_std is {found.get('image_std')}, not positive: correct it")
    return (0.0 - mean) / deviation, (brightest - mean) / deviation


def _numbers(
    found: dict[str, Any], name: str, otherwise: float, count: int, path: Path
) -> list[float]:
    value: Any = found.get(name)
    given: Any = otherwise if value is None else value
    values = cast("list[Any]", given) if isinstance(given, list) else count * [given]
    values = count * values if len(values) == 1 else values
    if len(values) != count or not all(
        isinstance(each, int | float) and abs(each) < float("inf") for each in values
    ):
        raise InputError(f"{path}: {name} is {value}, and {count} numbers are needed: correct it")
    return [float(each) for each in values]
