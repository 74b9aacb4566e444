"""The tensors of a model whose rows are tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from covmerge.base.errors import InputError
from covmerge.base.types import Role
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.config_counts import vocabulary_size
from covmerge.files.tensors.describe import describe_checkpoint
from covmerge.files.tensors.layers import layer_name
from covmerge.files.tensors.names import find_name

# Embeddings of something else than tokens.
_PLACES = re.compile(r"(^|[._])(wpe|pos|positions?|positional)(_|\.|$)", re.IGNORECASE)
_TYPES = re.compile(r"(^|[._])(token_type|type)(_|\.|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|\.)(lm_head|embed_out|output|predictions)(\.decoder)?\.bias$")


def rows_of(name: str) -> Literal["tokens", "places", "types"]:
    """What the rows of an embedding are of, by its name: tokens, places in a text, or types of these.

    Example:
        >>> rows_of("embeddings.word_embeddings.weight"), rows_of("transformer.wpe.weight")
        ('tokens', 'places')
    """
    return "places" if _PLACES.search(name) else "types" if _TYPES.search(name) else "tokens"


@dataclass(frozen=True)
class Tables:
    """The tables of a model, and what tells what another calls them.

    Attributes:
        names: of its tables.
        rows: of each.
        prefix: what a model with a head puts before the names of its base model.
        tied: name -> the name that it shares memory with, of which only that one may be stored.
    """

    names: frozenset[str]
    rows: int
    prefix: str | None
    tied: Mapping[str, str]

    def find(self, name: str, other: Tables) -> str | None:
        """Return what this model calls a table of another; None: it has none.

        What it ties the table to stands for it.
        """
        prefixes = [prefix for prefix in (self.prefix, other.prefix) if prefix]
        found = find_name(name, prefixes, self.names)
        if found is None and (tied := self.tied.get(name)) is not None:
            found = find_name(tied, prefixes, self.names)
        return found


def tables_of(checkpoint: Checkpoint) -> Tables:
    """Return the tensors whose first axis is the vocabulary.

    Token embedding and output embedding, and the bias of the latter. Without a config any number of
    rows is taken; with one, what has another number than it says is no such table.

    Raises:
        InputError: there is none, their numbers of rows differ, or a tensor has the vocabulary along
            another axis.
    """
    size = vocabulary_size(checkpoint.config)
    description = describe_checkpoint(checkpoint)
    found: dict[str, int] = {}
    for name, header in checkpoint.headers.items():
        if layer_name(name) is not None or not header.shape or rows_of(name) != "tokens":
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
    if len(set(found.values())) != 1:
        sizes = ", ".join(f"'{name}' {rows}" for name, rows in found.items()) or "none"
        raise InputError(
            f"{checkpoint.source}: its embeddings of tokens, with as many rows as config.json has tokens "
            f"({size}), are not of one number of rows (found: {sizes}): leave out `tokenizer`"
        )
    rows = next(iter(found.values()))
    return Tables(frozenset(found), rows, description.prefix, description.tied)
