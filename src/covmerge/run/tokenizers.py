"""Whether the experts' tokenizers have the base's tokens, whose rows are merged with theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.findings import Finding, Severity
from covmerge.files.checkpoints.json_file import read_object

_TOKENIZER = "tokenizer.json"
# Files that hold a vocabulary, where there is no tokenizer.json.
_VOCABULARIES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_MAX_BYTES = 256 << 20


def check_tokenizers(base: Path | None, experts: Mapping[str, Path | None]) -> Iterator[Finding]:
    """Hold the experts' tokenizers against the base's, which the merged model will have."""
    if base is None:
        return
    vocabulary = _vocabulary(base)
    for name, folder in experts.items():
        other = None if folder is None else _vocabulary(folder)
        if vocabulary is None or other is None or vocabulary == other:
            continue
        yield Finding(Severity.WARNING, _tokens_that_differ(vocabulary, other), name)


def _vocabulary(folder: Path) -> dict[str, int] | str | None:
    """Token -> number, or a hash of the file that holds them; None where there is none."""
    path = folder / _TOKENIZER
    if path.is_file():
        try:
            return _tokens(read_object(path))
        except CheckpointError as error:
            return str(error)
    for name in _VOCABULARIES:
        path = folder / name
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    found: object = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, int] = {}
    if isinstance(found, dict):
        tokens.update(cast("dict[str, int]", found))
    elif isinstance(found, list):  # unigram: pairs of token and score
        for number, pair in enumerate(cast("list[Any]", found)):
            if isinstance(pair, list) and pair:
                tokens[str(cast("list[Any]", pair)[0])] = number
    added: object = tokenizer.get("added_tokens")
    if isinstance(added, list):
        for entry in cast("list[Any]", added):
            if isinstance(entry, dict):
                token = cast("dict[str, Any]", entry)
                tokens[str(token.get("content"))] = token.get("id", -1)
    return tokens


def _tokens_that_differ(base: dict[str, int] | str, other: dict[str, int] | str) -> str:
    if isinstance(base, str) or isinstance(other, str):
        return (
            "its tokenizer is another file than the base's: check that both mean the same tokens; "
            "the merged model has the base's"
        )
    moved = [token for token in base if token in other and base[token] != other[token]]
    added = [token for token in other if token not in base]
    gone = [token for token in base if token not in other]
    parts = [
        f"{len(tokens)} tokens {what} (such as {tokens[0]!r:.40})"
        for what, tokens in (("added", added), ("missing", gone), ("with another number", moved))
        if tokens
    ]
    return (
        f"its tokenizer differs from the base's: {', '.join(parts)}. The merged model has the base's: "
        "what the expert learnt of the others is lost"
    )
