"""Which row of which source a token of the output has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.plan.recipe.tokenizer import BASE, ZERO, TokenizerRules, TokenRow
from covmerge.plan.vocabulary.tokens import Tokenizer

NONE, PADDING = -1, -2  # in place of a row


@dataclass(frozen=True)
class Source:
    """A model whose embeddings are read by token.

    Attributes:
        tokenizer: what its rows are; None: it takes no part, as an adapter that leaves them alone.
        rows: how many it has; a token with a larger number has none.
    """

    tokenizer: Tokenizer
    rows: int

    def row(self, token: str) -> int:
        """Return the row of a token; `NONE`: it has none."""
        number = self.tokenizer.ids.get(token, NONE)
        return number if number < self.rows else NONE


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the output's embeddings, by source; the base's key is None.

    Attributes:
        source_rows: by source, for each row of the output the row of the source that it is; `NONE`: what is
            given; `PADDING`: the mean of all others.
        given: by source, for each row of the output that some source is given the row of this source
            that it is, or that has a part in the mean; else `NONE`.
        tokens: how many rows are of tokens.
        texts: SHA-256 of the tokens with their numbers.
    """

    source_rows: Mapping[str | None, Tensor]
    given: Mapping[str | None, Tensor]
    tokens: int
    texts: str

    @property
    def rows(self) -> int:
        """Rows of every embedding of the output."""
        return len(next(iter(self.source_rows.values())))

    def keeps(self, source: str | None, rows: int) -> bool:
        """Whether a source's embeddings of so many rows look the same as they are stored."""
        return rows == self.rows and torch.equal(self.source_rows[source], torch.arange(rows))

    def as_json(self) -> dict[str, Json]:
        """What covmerge.json says of it: a hash stands for tokens and rows."""
        digest = hashlib.sha256(self.texts.encode())
        for kind, found in (("own", self.source_rows), ("given", self.given)):
            for source, rows in found.items():
                digest.update(f"{kind} {source!r}\n".encode())
                digest.update(rows.numpy().data)
        return {"rows": self.rows, "tokens": self.tokens, "sha256": digest.hexdigest()}


def vocabulary(
    ids: Mapping[str, int], end: int, rules: TokenizerRules, sources: Mapping[str | None, Source]
) -> tuple[Vocabulary, tuple[str, ...]]:
    """Decide on every row; and what a user should know.

    Args:
        ids: the output's tokens.
        end: one more than the largest number of them.
        rules: of the recipe.
        sources: the base, then the experts in their order.

    Raises:
        InputError: a rule names a token, or a row, that its model does not have.
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
            who = "the base" if key is None else f"expert '{key}'"
            notes.append(
                f"{who} has no row of its own for {len(tokens)} tokens, and is given one: "
                f"{some(sorted(tokens, key=ids.__getitem__), 3, quoted=True)}"
            )
    if of_nobody:
        examples = some(sorted(of_nobody, key=ids.__getitem__), 3, quoted=True)
        notes.append(f"{len(of_nobody)} tokens are of no model, and their rows are 0: {examples}")
    return notes
