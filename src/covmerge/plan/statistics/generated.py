"""Inputs that nobody had to collect, of whatever kind an expert takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.plan.statistics.leaves import Leaves
from covmerge.plan.statistics.sequences import LONG, Sequences
from covmerge.plan.statistics.written import Begun, Start, Written, writes

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

        Args:
            model: of transformers.
            source: what messages call it.

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
