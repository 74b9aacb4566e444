"""The source's row for each token of the output, and views of sources with these rows."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from covmerge.base.errors import InputError, TensorError
from covmerge.base.text import counted, some
from covmerge.base.types import Json, Role
from covmerge.files.checkpoints.base import Checkpoint, find_header
from covmerge.files.checkpoints.config_counts import vocabulary_size, with_vocabulary
from covmerge.files.checkpoints.view import View
from covmerge.files.tensors.describe import describe_checkpoint
from covmerge.files.tensors.names import find_name, layer_name
from covmerge.maths.linalg.stored import stored_as
from covmerge.plan.recipe.sections import BASE, ZERO, TokenizerRules, TokenRow
from covmerge.plan.vocabulary.tokens import Tokenizer

# Tensors of a model whose rows are tokens.

# Embeddings of something other than tokens.
_PLACES = re.compile(r"(^|[._])(wpe|pos|positions?|positional)(_|\.|$)", re.IGNORECASE)
_TYPES = re.compile(r"(^|[._])(token_type|type)(_|\.|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|\.)(lm_head|embed_out|output|predictions)(\.decoder)?\.bias$")


def rows_of(name: str) -> Literal["tokens", "places", "types"]:
    """Return what an embedding's rows stand for, by its name: tokens, positions in a text, or types.

    Example:
        >>> rows_of("embeddings.word_embeddings.weight"), rows_of("transformer.wpe.weight")
        ('tokens', 'places')
    """
    return "places" if _PLACES.search(name) else "types" if _TYPES.search(name) else "tokens"


@dataclass(frozen=True)
class Tables:
    """The tables of a model, with what is needed to match their names with another model's."""

    names: frozenset[str]
    rows: int  # number of rows of each table
    prefix: str | None  # see `ModelDescription`
    tied: Mapping[str, str]  # see `ModelDescription`

    def find(self, name: str, other: Tables) -> str | None:
        """Return this model's name for a table of another model, or None.

        If the model ties the table to another one, that one's name is returned.
        """
        prefixes = [prefix for prefix in (self.prefix, other.prefix) if prefix]
        found = find_name(name, prefixes, self.names)
        if found is None and (tied := self.tied.get(name)) is not None:
            found = find_name(tied, prefixes, self.names)
        return found


def tables_of(checkpoint: Checkpoint) -> Tables:
    """Return the tables by token: token embedding, output embedding, and the latter's bias.

    With a config, a tensor with another number of rows than it says is none of them.
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


NONE, PADDING = -1, -2  # stand for a row


def called(key: str | None) -> str:
    """Return the name of a source for messages; the base's key is None."""
    return "the base" if key is None else f"expert '{key}'"


@dataclass(frozen=True)
class Source:
    """A model whose embeddings are read by token."""

    tokenizer: Tokenizer  # tells the tokens of its rows
    rows: int  # number of its rows; tokens with larger numbers have no row

    def row(self, token: str) -> int:
        """Return the row of a token, or `NONE` if it has none."""
        number = self.tokenizer.ids.get(token, NONE)
        return number if number < self.rows else NONE


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the output's embeddings, for each source; the base's key is None."""

    # For each source, the source's row for each row of the output; `NONE`: the row in `given`;
    # `PADDING`: the mean of all other rows.
    source_rows: Mapping[str | None, Tensor]
    # For each source, its row for each row of the output that other sources are given; if several
    # sources have one, their mean is given; `NONE`: it gives no row.
    given: Mapping[str | None, Tensor]
    tokens: int  # number of rows that are tokens
    texts: str  # SHA-256 of the tokens with their numbers

    @property
    def rows(self) -> int:
        """Number of rows of each embedding of the output."""
        return len(next(iter(self.source_rows.values())))

    @property
    def givers(self) -> frozenset[str]:
        """Experts whose rows are given to others, such as the base."""
        return frozenset(
            key for key, rows in self.given.items() if key is not None and bool((rows >= 0).any())
        )

    def keeps_base(self, rows: int) -> bool:
        """Return whether the base's embeddings with this number of rows are the same as stored."""
        return rows == self.rows and torch.equal(self.source_rows[None], torch.arange(rows))

    def as_json(self) -> dict[str, Json]:
        """Return the facts for covmerge.json, with a hash of tokens and rows."""
        digest = hashlib.sha256(self.texts.encode())
        for kind, found in (("own", self.source_rows), ("given", self.given)):
            for source, rows in found.items():
                digest.update(f"{kind} {source!r}\n".encode())
                digest.update(rows.numpy().data)
        given: dict[str, Json] = {"given_by": sorted(self.givers)} if self.givers else {}
        return {"rows": self.rows, "tokens": self.tokens, "sha256": digest.hexdigest(), **given}


def vocabulary(
    ids: Mapping[str, int], end: int, rules: TokenizerRules, sources: Mapping[str | None, Source]
) -> tuple[Vocabulary, tuple[str, ...]]:
    """Return the rows of every source, the base first, and notes for the user.

    `ids` are the output's tokens with their numbers, and `end` is the largest number plus one.
    """
    step = rules.pad_to_multiple_of or 1
    rows = -(-end // step) * step
    source_rows = {key: [PADDING] * rows for key in sources}
    given = {key: [NONE] * rows for key in sources}
    of_nobody: list[str] = []
    borrowed: dict[str | None, list[str]] = {key: [] for key in sources}
    for token, number in ids.items():
        rule = rules.tokens.get(token)
        found = {key: source.row(token) for key, source in sources.items()}
        forced = rule is not None and rule.force
        for key, row in found.items():
            source_rows[key][number] = NONE if forced else row
            if row == NONE:
                borrowed[key].append(token)
        if not forced and NONE not in found.values():
            continue
        if rule is not None:
            givers = _by_rule(token, rule, sources)
        elif found.get(None, NONE) != NONE:
            givers = {None: found[None]}
        else:
            givers = {key: row for key, row in found.items() if row != NONE}
            if not givers:
                of_nobody.append(token)
        for key, row in givers.items():
            given[key][number] = row
    texts = hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()
    decided = Vocabulary(_tensors(source_rows), _tensors(given), len(ids), texts)
    return decided, tuple(_notes(decided, ids, of_nobody, borrowed))


def _tensors(rows: Mapping[str | None, list[int]]) -> dict[str | None, Tensor]:
    return {key: torch.tensor(found) for key, found in rows.items()}


def _by_rule(
    token: str, rule: TokenRow, sources: Mapping[str | None, Source]
) -> dict[str | None, int]:
    if rule.of == ZERO:
        return {}
    key = None if rule.of == BASE else rule.of
    if key not in sources:
        raise InputError(
            f"tokenizer.tokens[{token!r}] is of '{rule.of}', an adapter, which has the base's tokens: name "
            "the base"
        )
    source = sources[key]
    asked = token if rule.token is None else rule.token
    row = source.row(asked) if rule.id is None else rule.id
    if row == NONE:
        raise InputError(
            f"tokenizer.tokens[{token!r}] is of '{rule.of}', whose embedding has no row for the token "
            f"{asked!r}: name a model that has it, or another token by `token:`"
        )
    if row >= source.rows:
        raise InputError(
            f"tokenizer.tokens[{token!r}] is row {row} of '{rule.of}', which has {source.rows} rows: "
            "name a smaller `id`"
        )
    return {key: row}


def _notes(
    decided: Vocabulary,
    ids: Mapping[str, int],
    of_nobody: Sequence[str],
    borrowed: Mapping[str | None, Sequence[str]],
) -> list[str]:
    padding = decided.rows - len(ids)
    more = f", and {padding} rows of padding, each the mean of its model's rows" if padding else ""
    notes = [f"the output's vocabulary has {len(ids)} tokens{more}"]
    for key, tokens in borrowed.items():
        if tokens:
            notes.append(
                f"{called(key)} has no row of its own for {counted(len(tokens), 'token')}, and is given "
                f"one: {some(sorted(tokens, key=ids.__getitem__), 3, quoted=True)}"
            )
    if of_nobody:
        examples = some(sorted(of_nobody, key=ids.__getitem__), 3, quoted=True)
        are = counted(len(of_nobody), "token is", "tokens are")
        notes.append(f"{are} of no model, with rows of 0: {examples}")
    return notes


# A checkpoint whose embeddings have the rows of another vocabulary.

# Rows that are at most this far apart are read in one piece.
_NEAR = 4
_BLOCK_ELEMENTS = 2**20


class Retokenized(View):
    """A view of a checkpoint: row i of its embeddings is the row of the output's token i.

    A row that the checkpoint lacks is read from the sources that have it, and cast to the
    checkpoint's dtype. A mean of several rows, or of all rows (padding), is computed in float64 and
    rounded once. Rows are read from the files when they are asked for, so that no embedding is held
    in memory.
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
        """Return rows of tokens; rows of padding have no values yet."""
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
        """Return rows of other models in the dtype of the table."""
        try:
            return stored_as(rows, self.headers[name].dtype)
        except OverflowError as error:
            raise TensorError(
                f"'{name}' of {self.source} would get rows of other models that its dtype cannot hold "
                f"({error}): store the model in another dtype"
            ) from error

    def _given_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return rows that this source lacks: the mean of the sources that have them, or 0 if none has."""
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
        """Return the mean of the rows of all tokens, which is computed once."""
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
    """Read rows of a stored tensor into the places that want them, with one read for each piece."""
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
