"""Find experts that are the same model, and experts whose tokenizer differs from the base's."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.findings import Finding, Severity
from covmerge.base.text import counted, some
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import read_object
from covmerge.plan.planning.operations import expert_key

# The same model may be given under several names by mistake, or to increase its weight. A note reports it.


def alike_by_place(experts: Mapping[str, Checkpoint]) -> Iterator[str]:
    """Yield notes on experts with the same path or address; copies are found later, by their hashes."""
    return _alike({name: _found_at(checkpoint) for name, checkpoint in experts.items()})


def alike_by_content(sources: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on experts whose files have the same hashes, whatever the names of the files.

    Example:
        >>> content = {"model.safetensors": "sha256:1f"}
        >>> both = {f"expert {name}": {"source": name, "content": content} for name in ("a", "b")}
        >>> [text.partition(",")[0] for text in alike_by_content(both)]
        ["experts 'a' and 'b' are one model under 2 names"]
    """
    prefix = expert_key("")
    return _alike(
        {
            key.removeprefix(prefix): _hashes(source["content"])
            for key, source in sources.items()
            if key.startswith(prefix)
        }
    )


def _found_at(checkpoint: Checkpoint) -> Hashable | None:
    """Return the Hub name, address or resolved path of a checkpoint; None if it has none of them."""
    if "://" in checkpoint.source:
        return checkpoint.hub or checkpoint.source
    path = Path(checkpoint.source).expanduser()
    return path.resolve() if path.exists() else checkpoint.hub


def _hashes(content: Mapping[str, str]) -> Hashable | None:
    """Return the SHA-256 hashes of the files; None if a value is only a server's version of a file."""
    hashes = sorted(content.values())
    return tuple(hashes) if all(value.startswith("sha256:") for value in hashes) else None


def _alike(known: Mapping[str, Hashable | None]) -> Iterator[str]:
    names: dict[Hashable, list[str]] = {}
    for name, content in known.items():
        if content is not None:
            names.setdefault(content, []).append(name)
    for same in names.values():
        if len(same) > 1:
            listed = f"'{same[0]}' and '{same[1]}'" if len(same) == 2 else some(same, quoted=True)
            yield (
                f"experts {listed} are one model under {len(same)} names, which counts as often: leave out "
                "all but one, or choose its weight, unless it is meant"
            )


# Rows of embeddings are merged by token number, so the experts' tokenizers should have the base's tokens.

_TOKENIZER = "tokenizer.json"
# Files that hold the vocabulary if there is no tokenizer.json.
_VOCABULARIES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_MAX_BYTES = 256 << 20


def check_tokenizers(
    base: Path | None, experts: Mapping[str, Path | None], adapters: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield a warning per expert whose tokenizer differs; `adapters` names the adapters among them."""
    if base is None:
        return
    vocabulary = _vocabulary(base)
    for name, folder in experts.items():
        other = None if folder is None else _vocabulary(folder)
        if vocabulary is None or other is None or vocabulary == other:
            continue
        yield Finding(
            Severity.WARNING, _tokens_that_differ(vocabulary, other, name in adapters), name
        )


def _vocabulary(folder: Path) -> dict[str, int] | str | None:
    """Return {token: number}, the vocabulary file's hash or read error, or None if there is no file."""
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
    elif isinstance(found, list):  # a unigram model stores pairs of token and score
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


def _tokens_that_differ(
    base: dict[str, int] | str, other: dict[str, int] | str, of_adapter: bool
) -> str:
    if isinstance(base, str) or isinstance(other, str):
        return (
            "its tokenizer is another file than the base's: check that both mean the same tokens; "
            "the merged model has the base's"
        )
    moved = [token for token in base if token in other and base[token] != other[token]]
    added = [token for token in other if token not in base]
    gone = [token for token in base if token not in other]
    parts = [
        f"{counted(len(tokens), 'token')} {what} (such as {tokens[0]!r:.40})"
        for what, tokens in (("added", added), ("missing", gone), ("with another number", moved))
        if tokens
    ]
    lost = "The merged model has the base's: what the expert learnt of the others is lost"
    if of_adapter:
        lost = "An adapter is merged by the base's: what it learnt of the others is lost"
    return f"its tokenizer differs from the base's: {', '.join(parts)}. {lost}"
