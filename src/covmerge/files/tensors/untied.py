"""A checkpoint whose config ties tensors, shown as one that stores each of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from covmerge.base.errors import InputError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.config_counts import language_parts
from covmerge.files.checkpoints.view import View

TIED = "tie_word_embeddings"
_BLOCK_ELEMENTS = 8 * 2**20


class Untied(View):
    """A view of a checkpoint: every tied tensor is there, and the config ties none.

    Args:
        stored: the checkpoint.
        ties: names of tensors, stored or not -> the stored one that the config ties them to.
        notes: what a user should know.
    """

    def __init__(self, stored: Checkpoint, ties: Mapping[str, str], *notes: str) -> None:
        names = {name: name for name in stored.headers}
        copies = {name: target for name, target in ties.items() if name not in names}
        super().__init__(stored, names | copies, *notes)
        self.untied: Mapping[str, str] | None = MappingProxyType(dict(ties))
        self.quantisation = stored.quantisation  # under its own names
        self.config = None if stored.config is None else untied_config(stored.config)
        self.shared: Mapping[str, str] = {}


def seen_untied(checkpoint: Checkpoint, ties: Mapping[str, str] | None) -> Checkpoint:
    """Return a base as a merge read it: untied, if that merge undid ties.

    Args:
        checkpoint: the base.
        ties: what covmerge.json says under `untied`.

    Raises:
        InputError: the base has not the tensors that were tied.
    """
    if ties is None or checkpoint.untied is not None:
        return checkpoint
    if lost := [name for name in ties.values() if name not in checkpoint.headers]:
        raise InputError(
            f"the base at {checkpoint.source} is another than was merged: it has no '{lost[0]}'"
        )
    return Untied(checkpoint, ties)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with nothing tied.

    Example:
        >>> untied_config({"text_config": {"vocab_size": 8}})
        {'text_config': {'vocab_size': 8, 'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    found = dict(config)
    for key, part in language_parts(config):
        if key:
            found[key] = {**part, TIED: False}
    return {**found, TIED: False}


def same_values(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two stored tensors are equal to the bit, read in blocks."""
    header = checkpoint.headers[one]
    return header.shape == checkpoint.headers[other].shape and all(
        torch.equal(checkpoint.read(one, rows), checkpoint.read(other, rows))
        for rows in header.row_blocks(_BLOCK_ELEMENTS)
    )
