"""The tensors of a model whose rows are tokens."""

from __future__ import annotations

import re

from covmerge.checkpoints import Checkpoint
from covmerge.checkpoints.vocabulary_size import vocabulary_size
from covmerge.errors import InputError
from covmerge.tensors import ModelDescription, layer_name
from covmerge.types import Role

# Embeddings of something else than tokens.
_OTHER = re.compile(
    r"(^|[._])(wpe|pos|positions?|positional|token_type|type)(_|\.|$)", re.IGNORECASE
)
_BIAS = re.compile(r"(^|\.)(lm_head|embed_out|output|predictions)(\.decoder)?\.bias$")


def tables(checkpoint: Checkpoint, description: ModelDescription) -> dict[str, int]:
    """Return the tensors whose first axis is the vocabulary, with their rows.

    Token embedding and output embedding, and the bias of the latter. Without a config any number of
    rows is taken; with one, what has another number than it says is no such table.

    Raises:
        InputError: a tensor has the vocabulary along another axis.
    """
    size = vocabulary_size(checkpoint.config)
    found: dict[str, int] = {}
    for name, header in checkpoint.headers.items():
        if layer_name(name) is not None or not header.shape or _OTHER.search(name):
            continue
        role = description.tensors[name].role
        embeds = role in (Role.EMBEDDING, Role.OUTPUT) and len(header.shape) == 2
        bias = len(header.shape) == 1 and _BIAS.search(name) is not None
        if (embeds or bias) and size in (None, header.shape[0]):
            found[name] = header.shape[0]
        elif header.shape == (1, size):
            raise InputError(
                f"{checkpoint.source}: '{name}' {list(header.shape)} has the vocabulary along its columns, "
                "and only rows are merged by token: leave out `tokenizer`"
            )
    if len(set(found.values())) > 1:
        told = ", ".join(f"'{name}' {rows}" for name, rows in found.items())
        raise InputError(
            f"{checkpoint.source}: its embeddings have different numbers of rows ({told}), and one "
            "vocabulary has one: leave out `tokenizer`"
        )
    return found
