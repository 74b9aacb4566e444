"""Tied tensors that are stored twice must hold one value."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.errors import TensorError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.untied import same_values


def check_ties(checkpoint: Checkpoint, tied: Mapping[str, str]) -> None:
    """Compare what a config ties: only one of the two goes into the output.

    Raises:
        TensorError: they differ, so the config is wrong and dropping one would change the model.
    """
    for name, target in tied.items():
        if not same_values(checkpoint, name, target):
            raise TensorError(
                f"config.json of {checkpoint.source} ties '{name}' to '{target}', but both are stored "
                'and differ. If they are meant to differ, set "tie_word_embeddings": false in its '
                "config.json."
            )
