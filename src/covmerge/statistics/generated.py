"""Inputs that nobody had to collect, of whatever kind an expert takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from covmerge.errors import InputError
from covmerge.statistics.noise import Noise
from covmerge.statistics.sequences import Sequences
from covmerge.statistics.written import Start, Written, writes


@dataclass(frozen=True)
class Generated:
    """Inputs that are made for an expert, so that nobody's data is needed.

    A language model writes them (`Written`); an encoder of text is shown tokens drawn by the order of
    its vocabulary (`Sequences`), a model of pictures noise of a natural spectrum (`Noise`).

    Attributes:
        start: of what is written, see `Written`; as the next two for language models alone.
        tokens: of what is written.
        temperature: of what is written.
        seed: of what is drawn.

    Raises:
        InputError: there is no such start, or a number is out of range.

    Example:
        >>> Generated("chat", temperature=0.0)
        Traceback (most recent call last):
        covmerge.errors.InputError: temperature is 0.0: pass a positive number
    """

    start: Start | None = None
    tokens: int | None = None
    temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._written()

    def made_for(self, model: Any, source: str) -> Written | Sequences | Noise:
        """Return how inputs of the kind that a model takes are made.

        Args:
            model: of transformers.
            source: what messages call it.

        Raises:
            InputError: options are for another kind of model, or none are made for this kind.
        """
        if writes(model):
            return self._written()
        what, otherwise = f"{source} is a {type(model).__name__}", "pass a file of examples"
        if getattr(model.config, "is_encoder_decoder", False):
            raise InputError(f"{what}, for which covmerge makes no inputs: {otherwise}")
        given = [name for name in self._asked() if name != "seed"]
        if given:
            raise InputError(
                f"{what}, no language model that writes: leave out --{given[0]}, or {otherwise}"
            )
        kinds = {"input_ids": Sequences, "pixel_values": Noise}
        takes: str = model.main_input_name
        if takes not in kinds:
            raise InputError(
                f"{what} and takes '{takes}', which covmerge does not make: {otherwise}"
            )
        return kinds[takes](seed=self.seed)

    def _asked(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _written(self) -> Written:
        return Written(**self._asked())
