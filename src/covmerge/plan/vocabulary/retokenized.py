"""A checkpoint whose embeddings have the rows of another vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.base.errors import InputError, TensorError
from covmerge.files.checkpoints.base import Checkpoint, find_header
from covmerge.files.checkpoints.config_counts import with_vocabulary
from covmerge.files.checkpoints.view import View
from covmerge.maths.linalg.stored import stored_as
from covmerge.plan.vocabulary.rows import NONE, PADDING, Vocabulary
from covmerge.plan.vocabulary.tables import Tables

# Rows that are this near to each other are read as one piece.
_NEAR = 4
_BLOCK_ELEMENTS = 2**20


class Retokenized(View):
    """A view of a checkpoint: row i of its embeddings is that of token i of the output.

    A row that it lacks is read of the sources that have it, and cast to its dtype; where it is the mean
    of several, or of all rows (padding), it is computed in float64 and rounded once. Rows are gathered
    from the files as they are asked for: no embedding is held.

    Args:
        key: of the source.
        sources: all of them that have embeddings of their own.
        tables: of each.
        vocabulary: the rows.
    """

    def __init__(
        self,
        key: str | None,
        sources: Mapping[str | None, Checkpoint],
        tables: Mapping[str | None, Tables],
        vocabulary: Vocabulary,
    ) -> None:
        stored = sources[key]
        super().__init__(stored)
        self._own_tables = tables[key]
        self._tables = tables
        self._sources = sources
        self._source_rows = vocabulary.source_rows[key]
        self._given = vocabulary.given
        self._means: dict[str, Tensor] = {}
        self._computing = threading.Lock()
        if stored.config is not None:
            self.config = with_vocabulary(stored.config, vocabulary.rows)
        self.headers = MappingProxyType(
            {
                name: replace(header, shape=(vocabulary.rows, *header.shape[1:]))
                if name in self._own_tables.names
                else header
                for name, header in stored.headers.items()
            }
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, self.source)
        if name not in self._own_tables.names:
            return self._stored.read(name, rows)
        rows = range(header.shape[0]) if rows is None else rows
        found = self._of_tokens(name, rows)
        padding = self._source_rows[rows.start : rows.stop] == PADDING
        if bool(padding.any()):
            found[padding] = self._fitting(name, self._mean(name))
        return found

    def _of_tokens(self, name: str, rows: range) -> Tensor:
        """Rows of tokens; those of padding are left open."""
        source_rows = self._source_rows[rows.start : rows.stop]
        if len(source_rows) and int(source_rows[0]) >= 0 and bool((source_rows.diff() == 1).all()):
            return self._stored.read(name, range(int(source_rows[0]), int(source_rows[-1]) + 1))
        header = self.headers[name]
        found = torch.empty((len(rows), *header.shape[1:]), dtype=header.dtype)
        _gather(self._stored, name, source_rows, source_rows >= 0, found)
        lacks = (source_rows == NONE).nonzero()[:, 0]
        if len(lacks):
            found[lacks] = self._fitting(name, self._given_rows(name, lacks + rows.start))
        return found

    def _fitting(self, name: str, rows: Tensor) -> Tensor:
        """Rows of other models in the dtype of the table."""
        try:
            return stored_as(rows, self.headers[name].dtype)
        except OverflowError as error:
            raise TensorError(
                f"'{name}' of {self.source} would get rows of other models that its dtype cannot hold "
                f"({error}): store the model in another dtype"
            ) from error

    def _given_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows that this source lacks, of those that have them: the mean of several, 0 of none."""
        shape = self.headers[name].shape
        total = torch.zeros((len(rows), *shape[1:]), dtype=torch.float64)
        counts = torch.zeros(len(rows))
        for key, given in self._given.items():
            theirs = given[rows]
            has = theirs >= 0
            if not bool(has.any()):
                continue
            other = self._sources[key]
            table = self._tables[key].find(name, self._own_tables)
            if table is None or other.headers[table].shape[1:] != shape[1:]:
                raise InputError(
                    f"'{name}' of {self.source} needs rows of {other.source}, which has no such "
                    "table of these columns: give the tokens rows of another model under "
                    "`tokenizer: {tokens: ...}`"
                )
            part = torch.zeros(total.shape, dtype=other.headers[table].dtype)
            _gather(other, table, theirs, has, part)
            total += part
            counts += has
        return total / counts.clamp(min=1).view(-1, *[1] * (total.ndim - 1))

    def _mean(self, name: str) -> Tensor:
        """The mean of the rows of all tokens, which is computed once."""
        with self._computing:
            if name not in self._means:
                header = self.headers[name]
                total = torch.zeros(header.shape[1:], dtype=torch.float64)
                for rows in header.row_blocks(_BLOCK_ELEMENTS):
                    assert rows is not None
                    named = self._source_rows[rows.start : rows.stop] != PADDING
                    total += self._of_tokens(name, rows)[named].double().sum(0)
                self._means[name] = total / int((self._source_rows != PADDING).sum())
            return self._means[name]


def _gather(checkpoint: Checkpoint, name: str, rows: Tensor, wanted: Tensor, into: Tensor) -> None:
    """Put rows of a stored tensor to the places that want them, by as few reads as there are pieces."""
    places = wanted.nonzero()[:, 0]
    if not len(places):
        return
    order = places[rows[places].argsort()]
    asked = rows[order]
    apart = asked.diff() > _NEAR
    piece = torch.cat([torch.zeros(1, dtype=torch.long), apart.long().cumsum(0)])
    firsts = asked[torch.cat([torch.ones(1, dtype=torch.bool), apart])]
    ends = asked[torch.cat([apart, torch.ones(1, dtype=torch.bool)])] + 1
    pieces = [
        checkpoint.read(name, range(int(first), int(end)))
        for first, end in zip(firsts, ends, strict=True)
    ]
    before = (ends - firsts).cumsum(0) - (ends - firsts)
    into[order] = torch.cat(pieces)[before[piece] + asked - firsts[piece]]
