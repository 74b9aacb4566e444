"""How sure a classifier is of an example: it makes of one probe each expert's own.

Inputs that are the same for all experts give the mean. An expert that keeps its head tells which of
them it knows something of: an example, with everything that a layer sees of it, counts by

    w = 1 − H(p) / log K        p: the head's probabilities of its K labels, H their entropy

which is 1 where the head is sure and 0 where all labels are alike to it. Weights are brought to mean 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from covmerge.errors import InputError
from covmerge.plan.statistics.examples import Batch
from covmerge.plan.statistics.model import ObservedLayer, RunningModel

_ONE_OF_MANY = (None, "single_label_classification")
_ROUNDING = 1e-12  # a weight of no more is what rounding leaves of 0


class Confidence:
    """Weights of a layer's inputs, by how sure the head is of the example that they belong to.

    Args:
        model: the expert, with its head.

    Attributes:
        relative: whether the weights are relative to other experts.

    Raises:
        InputError: it has no head that tells one of several labels.
    """

    relative = False

    def __init__(self, model: RunningModel) -> None:
        labels = getattr(model.whole.config, "num_labels", 0)
        kind = getattr(model.whole.config, "problem_type", None)
        one = "Classification" in type(model.whole).__name__ and kind in _ONE_OF_MANY
        if not one or labels < 2:
            raise InputError(
                f"{model.checkpoint.source} is a {type(model.whole).__name__} of {labels} labels, without "
                f"a head that is sure of one of several"
            )
        self._model = model
        self._weight = 1.0
        self._largest = 0.0

    def inspect_rows(self, example: Batch) -> None:
        """Ask the head of one example; until the next one, its weight is what `of` gives.

        Raises:
            InputError: the head does not give a finite number for each label.
        """
        with torch.no_grad():
            found: Any = self._model.run(example, head=True)
        logits = getattr(found, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else None
            raise InputError(
                f"the head of {self._model.checkpoint.source} gives {shape}, and not a number for each "
                "label"
            )
        if not bool(logits.isfinite().all()):
            raise InputError(
                f"the head of {self._model.checkpoint.source} gives numbers that are not finite, by "
                "which nothing can be weighed: correct its weights"
            )
        self._weight = confidence(logits[0])
        self._largest = max(self._largest, self._weight)

    def check(self) -> None:
        """Refuse a head that was sure of no example, when all have been seen.

        Raises:
            InputError: all labels were alike to it, but for rounding.
        """
        if self._largest <= _ROUNDING:
            raise InputError(
                f"to the head of {self._model.checkpoint.source} all labels of every example are alike, so "
                "that none would count"
            )

    def of(self, layer: ObservedLayer, inputs: Tensor) -> Tensor:
        """Return the weights `(rows,)` of inputs `(rows, d_in)`."""
        return torch.full((len(inputs),), self._weight, device=inputs.device)

    def as_json(self) -> dict[str, str | int | float]:
        """What a statistics file says of it."""
        return {"weights": "1 - H(p) / log K, of mean 1"}

    def notes(self) -> list[str]:
        """There is nothing to be noted."""
        return []


def confidence(logits: Tensor) -> float:
    """Return 1 − H(p)/log K of a head's numbers `(K,)`.

    Example:
        >>> round(confidence(torch.zeros(3)), 9), confidence(torch.tensor([99.0, 0.0]))
        (0.0, 1.0)
    """
    odds = logits.double().log_softmax(-1)
    entropy = -float((odds.exp() * odds).sum())
    return max(0.0, 1.0 - entropy / math.log(len(logits)))
