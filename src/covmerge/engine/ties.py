"""Tied tensors that are stored twice must hold one value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from covmerge.checkpoints import Checkpoint
from covmerge.errors import TensorError

_BLOCK_ELEMENTS = 8 * 2**20


def check_ties(checkpoint: Checkpoint, tied: Mapping[str, str]) -> None:
    """Compare what a config ties: only one of the two goes into the output.

    Raises:
        TensorError: they differ, so the config is wrong and dropping one would change the model.
    """
    for name, kept in tied.items():
        header = checkpoint.headers[name]
        same = header.shape == checkpoint.headers[kept].shape and all(
            torch.equal(checkpoint.read(name, rows), checkpoint.read(kept, rows))
            for rows in header.row_blocks(_BLOCK_ELEMENTS)
        )
        if not same:
            raise TensorError(
                f"config.json of {checkpoint.source} ties '{name}' to '{kept}', but both are stored "
                'and differ. If they are meant to differ, set "tie_word_embeddings": false in its '
                "config.json."
            )
