"""Inputs that nobody had to collect, of whatever kind an expert takes."""

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

# Token sequences at random: for encoders, which write nothing, and for what any model of text sees.
#
# A vocabulary lists its words by frequency, or by the order in which frequent pairs were joined, which
# comes near it. So the rank stands in for the frequency by Zipf's law, p ∝ 1 / (rank + 20).

_OFFSET = 20
LENGTHS = (3, 9, 18)
LONG = (8, 24, 64)  # of language models, whose texts are longer
_IN_BRACKETS = re.compile(r"[\[<]\w+[\]>]")  # [unused7], <0x0A>: places, and no words
_MARKS = re.compile(r"^(##|[Ġ▁])")  # that a word goes on, or begins


@dataclass(frozen=True)
class Sequences:
    """Tokens drawn by their rank, between the special tokens, a third each of three lengths.

    Attributes:
        seed: of the tokens.
        lengths: of a third of the texts each.
        shared: whether all experts are shown the same.
    """

    shared: ClassVar[bool] = True

    seed: int = 0
    lengths: tuple[int, ...] = LENGTHS

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        """What a statistics file says of it."""
        return {
            "kind": f"tokens, p = 1 / (rank + {_OFFSET})",
            "lengths": ", ".join(map(str, self.lengths)),
            "seed": self.seed,
        }

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches of one length each, so that nothing is padded.

        Raises:
            InputError: there is no tokenizer, it has no words, or texts have no room for one.
        """
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
    """The special tokens before a text and behind it."""
    text = "a"
    bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(text)["input_ids"]
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    before, after = whole[:at], whole[at + len(bare) :]
    return torch.tensor(before, dtype=torch.long), torch.tensor(after, dtype=torch.long)


def _words(tokenizer: Any, size: int) -> Tensor:
    """The ids of ordinary tokens, by rank.

    Single characters come last: a vocabulary begins with its alphabet, in no order of frequency.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ranked = sorted(
        (len(_MARKS.sub("", token)) < 2, number)
        for token, number in vocabulary.items()
        if number not in special and number < size and not _IN_BRACKETS.fullmatch(token)
    )
    return torch.tensor([number for _, number in ranked], dtype=torch.long)


# Pictures of dead leaves, which have the edges and the spectrum that natural pictures have.

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


_MOST_SEEDS = 2**62  # a batch's number is added to it


@dataclass(frozen=True)
class Generated:
    """Inputs that are made for a model, so that nobody's data is needed.

    A language model writes them (`Written`), unless they are to be random; an encoder of text is shown
    tokens drawn by the order of its vocabulary (`Sequences`), a model of pictures discs that hide
    one another (`Leaves`).

    Attributes:
        start: of what is written, see `Written`; `base`: the base, which is to be named beside, writes
            the first 16 tokens of each text; `random`: nothing is written, a language model too is shown
            drawn tokens.
        tokens: of what is written.
        temperature: of what is written.
        seed: of what is drawn.
        begun: what the base began; `collect` lets it.

    Raises:
        InputError: there is no such start, or a number is out of range.

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
        """Return how inputs of the kind that a model takes are made.

        Raises:
            InputError: options are for another kind of model, or none are made for this kind.
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
