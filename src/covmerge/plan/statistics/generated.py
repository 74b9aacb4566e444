"""Inputs that are made for a model, so that no data has to be collected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.json_file import read_object
from covmerge.plan.statistics.examples import Batch, Reading, longest_text
from covmerge.plan.statistics.written import Begun, Start, Written, writes

if TYPE_CHECKING:
    from covmerge.plan.statistics.model import RunningModel

# Random token sequences, for encoders, which write nothing, and as inputs for any model of text.
#
# A vocabulary lists its words by frequency, or in the order in which frequent pairs were joined,
# which is similar. So the rank replaces the frequency in Zipf's law, p ∝ 1 / (rank + 20).

_OFFSET = 20
LENGTHS = (3, 9, 18)
LONG = (8, 24, 64)  # for language models, whose texts are longer
_IN_BRACKETS = re.compile(r"[\[<]\w+[\]>]")  # [unused7], <0x0A>: placeholders, not words
_MARKS = re.compile(r"^(##|[Ġ▁])")  # marks of a word's continuation or beginning


@dataclass(frozen=True)
class Sequences:
    """Tokens drawn by their rank, between special tokens; a third of the texts has each length."""

    shared: ClassVar[bool] = True  # whether all experts get the same inputs

    seed: int = 0
    lengths: tuple[int, ...] = LENGTHS  # numbers of tokens, each for a third of the texts

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        return {
            "kind": f"tokens, p = 1 / (rank + {_OFFSET})",
            "lengths": ", ".join(map(str, self.lengths)),
            "seed": self.seed,
        }

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches with texts of one length each, so that nothing is padded."""
        tokenizer, source = model.tokenizer(reading), model.checkpoint.source
        before, after = _around(tokenizer)
        words = _words(tokenizer, model.whole.get_input_embeddings().num_embeddings)
        limit = reading.max_length or longest_text(tokenizer, model.whole.config)
        room = max(self.lengths) if limit is None else limit - len(before) - len(after)
        if not len(words) or room < 1:
            problem = "has no words" if not len(words) else f"leaves no room in {limit} tokens"
            raise InputError(f"the tokenizer of {source} {problem}: pass a file of examples")
        odds = 1.0 / (torch.arange(len(words)) + _OFFSET)
        draw = torch.Generator().manual_seed(self.seed)
        for number, length in enumerate(self.lengths):
            count = (reading.wanted + number) // len(self.lengths)
            if not count:
                continue
            shape = (count, min(length, room))
            drawn = torch.multinomial(odds, count * shape[1], replacement=True, generator=draw)
            ids = torch.cat(
                [before.expand(count, -1), words[drawn].reshape(shape), after.expand(count, -1)], 1
            )
            for first in range(0, count, reading.at_once):
                part = ids[first : first + reading.at_once]
                yield {"input_ids": part, "attention_mask": torch.ones_like(part)}


def _around(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the special tokens before a text and after it."""
    text = "a"
    bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(text)["input_ids"]
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    before, after = whole[:at], whole[at + len(bare) :]
    return torch.tensor(before, dtype=torch.long), torch.tensor(after, dtype=torch.long)


def _words(tokenizer: Any, size: int) -> Tensor:
    """Return the ids of ordinary tokens, by rank.

    Single characters come last, because a vocabulary begins with its alphabet, not ordered by
    frequency.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ranked = sorted(
        (len(_MARKS.sub("", token)) < 2, number)
        for token, number in vocabulary.items()
        if number not in special and number < size and not _IN_BRACKETS.fullmatch(token)
    )
    return torch.tensor([number for _, number in ranked], dtype=torch.long)


# Pictures of dead leaves, whose edges and spectrum are like those of natural pictures.

_PREPROCESSOR = "preprocessor_config.json"
_MOST_VALUES = 2**26  # most values of one picture; real ones have 2**20
_SMALLEST, _LARGEST = 0.02, 0.5  # radii as shares of a picture's longer side, at least a pixel
_AT_ONCE = 64  # leaves drawn at once; a large picture has about 1,500
_PIXELS = 2**16  # pixels compared with all of these leaves at once


@dataclass(frozen=True)
class Leaves:
    """Discs of one colour each that cover one another, in the range of the model's pixel values.

    Discs of radius r have a density r⁻³, so that pictures look alike from near and from far. Their
    spectrum is that of natural pictures, about 1/f, and so are their edges, which noise with that
    spectrum lacks (Lee, Mumford and Huang 2001, §4; for what a network learns from such pictures
    see Baradad et al. 2021, §3).
    """

    shared: ClassVar[bool] = True  # whether all experts get the same inputs

    seed: int = 0

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        return {"kind": "dead leaves", "seed": self.seed}

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches of pictures `(batch, channels, height, width)`."""
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
    """Return a picture with values in [-1, 1]; top leaves are drawn first, until all pixels are covered."""
    channels, height, width = shape
    side = max(height, width)
    least, most = max(_SMALLEST * side, 1.0), max(_LARGEST * side, 1.0)
    picture, bare = torch.empty(channels, height * width), torch.arange(height * width)
    while len(bare):
        leaves = torch.rand(_AT_ONCE, 3 + channels, generator=draw)
        # This is the inverse distribution function of r² for the density r⁻³.
        radius = (most**-2 + leaves[:, :1] * (least**-2 - most**-2)).rsqrt()
        down = leaves[:, 1:2] * (height + 2.0 * radius) - radius
        across = leaves[:, 2:3] * (width + 2.0 * radius) - radius
        still: list[Tensor] = []
        for pixels in torch.split(bare, _PIXELS):
            row = pixels // width
            away = (row - down).square() + (pixels - width * row - across).square()
            covers = away <= radius.square()
            hidden = covers.any(0)
            top = covers.byte().argmax(0)[hidden]  # the first of several leaves
            picture[:, pixels[hidden]] = 2.0 * leaves[top, 3:].mT - 1.0
            still.append(pixels[~hidden])
        bare = torch.cat(still)
    return picture.view(shape)


def _shape(config: Any, source: str) -> tuple[int, int, int]:
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
    """Return the darkest and brightest value of each channel, `(channels, 1, 1)`; -1 and 1 by default."""
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


_MOST_SEEDS = 2**62  # the number of a batch is added to the seed


@dataclass(frozen=True)
class Generated:
    """Inputs that are made for a model, so that no data is needed.

    A language model writes texts (`Written`), unless random inputs are asked for. A text encoder
    gets tokens drawn by their rank in its vocabulary (`Sequences`). A model of pictures gets discs
    that cover one another (`Leaves`).

    Attributes:
        start: start of texts, see `Written`; `base`: the base, which must be named too, writes the
            first 16 tokens of each text; `random`: a language model gets drawn tokens too, and
            writes nothing.
        tokens: number of tokens that are written.
        temperature: temperature of the writing.
        seed: seed of everything that is drawn.
        begun: the beginnings that the base wrote; `collect` sets it.

    Raises:
        InputError: the start is unknown, or a number is out of range.

    Example:
        >>> Generated("chat", temperature=0.0)
        Traceback (most recent call last):
        covmerge.base.errors.InputError: temperature is 0.0: pass a positive number
    """

    start: Start | Literal["random"] | None = None
    tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    begun: Begun | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _MOST_SEEDS:
            raise InputError(f"seed is {self.seed}: pass a number from 0 to {_MOST_SEEDS - 1}")
        if self.start != "random":
            self._written()
            return
        given = self._asked("tokens", "temperature")
        if given:
            raise InputError(f"random inputs are not written: leave out {Hint(given[0])}")

    def made_for(self, model: Any, source: str) -> Written | Sequences | Leaves:
        """Return the maker of inputs for the kind of a model.

        Raises:
            InputError: options are for another kind of model, or this kind is not supported.
        """
        if writes(model) and self.start != "random":
            return self._written()
        what, takes = f"{source} is a {type(model).__name__}", str(model.main_input_name)
        if getattr(model.config, "is_encoder_decoder", False):
            raise InputError(
                f"{what}, for which covmerge makes no inputs: pass batches from Python"
            )
        given = [] if self.start == "random" else self._asked("start", "tokens", "temperature")
        if given:
            raise InputError(f"{what}, no language model that writes: leave out {Hint(given[0])}")
        if takes == "input_ids":
            return Sequences(self.seed, LONG) if writes(model) else Sequences(self.seed)
        if takes == "pixel_values":
            return Leaves(seed=self.seed)
        raise InputError(
            f"{what} and takes '{takes}', which covmerge does not make: pass batches from Python"
        )

    def _asked(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _written(self) -> Written:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return Written(**{name: value for name, value in given.items() if value is not None})
