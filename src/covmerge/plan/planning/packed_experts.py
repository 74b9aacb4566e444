"""Mixtures of experts that one source holds packed, as transformers has them in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable

from covmerge.base.errors import TensorError

_PACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_APART = re.compile(r"\.experts\.\d+\.")


def check_packing(base: tuple[str, Iterable[str]], expert: tuple[str, Iterable[str]]) -> None:
    """Refuse to align a packed mixture with one whose experts are tensors of their own.

    Names, and the order of rows, differ by the kind of model, which the base's config tells
    (`files/checkpoints/conversions.py`). transformers also knows them when it saves a model: one that it
    has loaded packed it saves packed again, but not one that it has built.

    Args:
        base: what a message calls it, and the names of its tensors.
        expert: the same.

    Raises:
        TensorError: one of them is packed, and the other is not.
    """
    for (called, given), (other, others) in ((base, expert), (expert, base)):
        names, beside = dict.fromkeys(given), dict.fromkeys(others)
        # What both have is not where they differ.
        packed = next((n for n in names if _PACKED.search(n) and n not in beside), None)
        apart = next((n for n in beside if _APART.search(n) and n not in names), None)
        if packed is not None and apart is not None:
            raise TensorError(
                f"{called} has all experts of a layer in one tensor ('{packed}'), as transformers has "
                f"them in memory, and {other} each by itself ('{apart}'). How they are packed, tells the "
                "base's config.json: pass the base's folder. Or pass the packed one as transformers saves "
                "a new model, `new = type(model)(model.config).to(model.dtype); "
                "new.load_state_dict(model.state_dict()); new.save_pretrained(FOLDER)`"
            )
