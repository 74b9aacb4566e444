"""A model's tokenizer as transformers loads it: its tokens, and which of them were added."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from covmerge.base.errors import InputError, panics_as_errors
from covmerge.base.settings import Hint
from covmerge.base.text import matches_any
from covmerge.files.checkpoints.json_file import MAX_JSON_BYTES, parse_object, shorten
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import read_regular
from covmerge.files.tensors.skeleton import in_short, quiet
from covmerge.plan.statistics.model import require_transformers

# Checks of the numbers that a tokenizer's files give to added tokens.

ADDED_TOKENS = "added_tokens.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# transformers and tokenizers count tokens with 32 bits. A row has two bytes or more, so no table is
# as long.
_MOST_ROWS = 2**32
_MOST_DIGITS = 10


def _check_added(path: Path, content: Mapping[str, Any]) -> None:
    """Raise if an added_tokens.json gives a token no valid number, or two tokens the same number.

    transformers would fail elsewhere, or silently use another number.
    """
    tokens: dict[int, str] = {}
    for token, number in content.items():
        if not token:
            raise InputError(
                f"{path} gives the empty text the number {shorten(number)}, and no token is empty: "
                "remove it"
            )
        # A truth value is an int in Python, and 340.0 is another spelling of a number in JSON.
        if type(number) is not int or not 0 <= number < _MOST_ROWS:
            raise InputError(
                f"{path} gives {shorten(token)} the number {shorten(number)}, and a token's is a whole "
                "number from 0, such as 340: correct it, or save the tokenizer with a tokenizer.json"
            )
        if number in tokens:
            raise InputError(
                f"{path} gives {shorten(tokens[number])} and {shorten(token)} the same number "
                f"{number}: correct it, or save the tokenizer with a tokenizer.json"
            )
        tokens[number] = token


def _check_listed(path: Path, config: Mapping[str, Any]) -> None:
    """Raise if tokenizer_config.json's list of tokens is invalid, or has a key that is no number."""
    decoder: Any = config.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        raise InputError(
            f"{path} gives added_tokens_decoder {shorten(decoder)}, and it is an object of numbers and "
            "their tokens: correct it"
        )
    for number, token in _listed(config):
        if not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
            raise InputError(
                f"{path} gives {shorten(token)} the number {shorten(number)}, which is none: correct it"
            )


def _check_numbers(folder: Path, files: Mapping[str, bytes], ids: Mapping[str, int]) -> None:
    """Raise if added tokens have other numbers than in the files, which tell what each row was trained as.

    transformers gives added tokens the next free numbers; its older releases used the files' numbers.
    """

    @cache
    def known() -> Mapping[str, int]:
        return _parsed(folder, files[TOKENIZER]).get_vocab(with_added_tokens=True)

    for name, token, number in _stated(folder, files):
        if ids.get(token) == number:
            continue
        # This file has precedence over the others, but does not say anything about tokens that it lacks.
        if TOKENIZER in files and (token in known() or token not in ids):
            continue
        read = "none" if token not in ids else str(ids[token])
        raise InputError(
            f"{folder / name} gives {shorten(token)} the number {shorten(number)}, and transformers "
            f"reads {read}: its row would be taken for another token's. Save the tokenizer "
            f"with a {TOKENIZER} that has these numbers, or leave out `tokenizer`"
        )


def _parsed(folder: Path, content: bytes) -> Any:
    """Return the tokenizer of the library tokenizers for a tokenizer.json."""
    tokenizers: Any = importlib.import_module("tokenizers")  # transformers' own
    try:
        with panics_as_errors():
            return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # it has no class of errors of its own
        raise InputError(
            f"{folder / TOKENIZER} is no tokenizer to the library tokenizers: save the model anew"
        ) from error


def _stated(folder: Path, files: Mapping[str, bytes]) -> Iterator[tuple[str, str, int]]:
    """Yield the tokens that files give numbers to: the file, the token, the number."""
    if ADDED_TOKENS in files:
        content = parse_object(files[ADDED_TOKENS], str(folder / ADDED_TOKENS))
        yield from ((ADDED_TOKENS, token, number) for token, number in content.items())
    # Beside a tokenizer.json, the list in this file is only a copy.
    if TOKENIZER_CONFIG not in files or TOKENIZER in files:
        return
    config = parse_object(files[TOKENIZER_CONFIG], str(folder / TOKENIZER_CONFIG))
    yield from ((TOKENIZER_CONFIG, token, int(number)) for number, token in _listed(config))


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers and tokens in tokenizer_config.json, unchanged."""
    decoder: Any = config.get("added_tokens_decoder")
    given = cast("dict[str, Any]", decoder) if isinstance(decoder, dict) else {}
    for number, raw in given.items():
        token: Any = cast("dict[str, Any]", raw).get("content") if isinstance(raw, dict) else None
        if isinstance(token, str):
            yield number, token


# A SentencePiece model under a name that only mistral-common knows.
_MISTRALS = "*.model.v[0-9]*"
# Files that belong to a tokenizer, at the top of a folder.
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    ADDED_TOKENS,
    "vocab*.json",
    "vocab*.txt",
    "vocab*.bpe",
    "merges.txt",
    "bpe.codes",
    "tekken.json",
    "*.model",
    _MISTRALS,
    "*.spm",
    "*.tiktoken",
    "chat_template*.jinja",
    "chat_template*.json",
)
# transformers reads the tokens from one of these files.
_VOCABULARIES = (TOKENIZER, "vocab*", "tekken.json", "*.model", "*.spm", "*.tiktoken")
# This file gives the kind of tokenizer if no other file does.
_CONFIG, _KIND = "config.json", ("model_type",)
_MOST_HOLES = 1024
_SENTENCEPIECE = (".model", ".spm")
INSTALL_SENTENCEPIECE = "pip install 'covmerge[sentencepiece]'"


@dataclass(frozen=True)
class Added:
    """A token that was added to a tokenizer, with the settings by which it is found in texts."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer."""

    folder: Path
    files: Mapping[str, bytes] = field(repr=False)  # its files, as they were read
    hashes: Mapping[str, str]
    ids: Mapping[str, int] = field(repr=False)  # the number of every token
    added: Mapping[int, Added]  # the tokens that were added to its model, by number

    @cached_property
    def end(self) -> int:
        """The largest number of a token plus one."""
        end = max(self.ids.values(), default=-1) + 1
        if end > 2 * len(self.ids) + _MOST_HOLES:
            raise InputError(
                f"{self.folder}: its tokenizer has {len(self.ids)} tokens, and one of them the number "
                f"{end - 1}: correct {TOKENIZER}"
            )
        return end

    def extended(self, more: Sequence[Added]) -> tuple[dict[str, int], bytes]:
        """Return the numbers of all tokens including new ones, and a tokenizer.json with all of them."""
        tokenizer, transformers = _loaded(self.folder, self.files), _transformers()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"{self.folder}: tokens cannot be added to a {type(tokenizer).__name__}: save the model "
                f"with a {TOKENIZER}, or take another model's tokenizer by {Hint('tokenizer')}"
            )
        tokenizer.add_tokens([transformers.AddedToken(**vars(one)) for one in more])
        ids = dict(tokenizer.get_vocab())
        lost = [one.content for one in more if one.content not in ids]
        moved = [token for token, number in self.ids.items() if ids.get(token) != number]
        if lost or moved or len(set(ids.values())) < len(ids):
            raise InputError(
                f"{self.folder}: the token {[*lost, *moved, more[0].content][0]!r} cannot be added to its "
                f"tokenizer without moving others: take another model's tokenizer by {Hint('tokenizer')}"
            )
        appended = self._appended(ids, more)
        content = json.loads(backend.to_str()) if appended is None else appended
        return ids, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()

    def _appended(self, ids: Mapping[str, int], more: Sequence[Added]) -> dict[str, Any] | None:
        """Return the folder's tokenizer.json with more tokens; None: it is missing, or gives other numbers.

        transformers may write a different tokenizer.json, such as that of the class that a config
        names.
        """
        if TOKENIZER not in self.files:
            return None
        content = parse_object(self.files[TOKENIZER], str(self.folder / TOKENIZER))
        entries = [{"id": ids[one.content], **asdict(one)} for one in more]
        content["added_tokens"] = [*(content.get("added_tokens") or []), *entries]
        tokenizers: Any = importlib.import_module("tokenizers")  # transformers' own
        made = tokenizers.Tokenizer.from_str(json.dumps(content))
        return content if made.get_vocab(with_added_tokens=True) == ids else None


def cut_apart(one: Tokenizer, other: Tokenizer) -> list[str]:
    """Return parts in which two tokenizers split texts differently, by their names in tokenizer.json.

    The result is empty if one of them has no such file. Merges and scores are compared for pieces
    that both have.
    """
    if TOKENIZER not in one.files or TOKENIZER not in other.files or one.hashes == other.hashes:
        return []
    # Other releases omit defaults, or write merges as texts; the library writes both in one way.
    ours, theirs = (
        json.loads(_parsed(t.folder, t.files[TOKENIZER]).to_str()) for t in (one, other)
    )
    found = [
        part
        for part in ("normalizer", "pre_tokenizer")
        if _without_offsets(ours[part]) != _without_offsets(theirs[part])
    ]
    models = ours["model"], theirs["model"]
    listed = ("vocab", "merges")
    kinds = [{key: value for key, value in m.items() if key not in listed} for m in models]
    pieces = [dict(m["vocab"]) for m in models]  # piece -> number or score
    shared = pieces[0].keys() & pieces[1].keys()
    merges = [[(a, b) for a, b in m.get("merges", ()) if {a, b, a + b} <= shared] for m in models]
    if kinds[0] != kinds[1]:
        found.append("model")
    elif merges[0] != merges[1]:
        found.append("merges")
    elif isinstance(models[0]["vocab"], list) and any(
        pieces[0][piece] != pieces[1][piece] for piece in shared
    ):
        found.append("scores")
    return found


def _without_offsets(part: Any) -> Any:
    """Return a part of a tokenizer.json without settings that affect only offsets."""
    if isinstance(part, list):
        return [_without_offsets(one) for one in cast("list[Any]", part)]
    if isinstance(part, dict):
        fields = cast("dict[str, Any]", part).items()
        return {key: _without_offsets(value) for key, value in fields if key != "trim_offsets"}
    return part


def read_tokenizer(folder: Path | None, loaded: dict[str, Tokenizer]) -> Tokenizer | None:
    """Return the tokenizer in a folder, or None if there is none; `loaded` keeps those with other files."""
    files = {} if folder is None else read_files(folder)
    if folder is None or not files:
        return None
    hashes = hashes_of(files)
    key = json.dumps(sorted(hashes.items()))
    if key not in loaded:
        loaded[key] = _read(folder, files, hashes)
    return replace(loaded[key], folder=folder)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer with their content; none if there is no vocabulary."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    found: dict[str, bytes] = {}
    if not any(matches_any(path.name, _VOCABULARIES) for path in paths):
        # Without this error the model would be taken to have the other models' tokens.
        for path in (path for path in paths if fnmatchcase(path.name, _MISTRALS)):
            plain, _, _ = path.name.rpartition(".v")
            raise InputError(
                f"{path} is the only file with the tokens of this model, and transformers reads none of "
                f"this name: copy it to {plain} beside it, or save the model with a {TOKENIZER}"
            )
        return found
    for path in paths:
        is_tokenizer = matches_any(path.name, TOKENIZER_FILES)
        if not (is_tokenizer or path.name == _CONFIG):
            continue
        content = read_regular(safe_child(folder, path.name), MAX_JSON_BYTES)
        # Files are checked before other libraries parse them, because these are less careful.
        value = parse_object(content, str(path)) if path.suffix == ".json" else {}
        if path.name == ADDED_TOKENS:
            _check_added(path, value)
        if path.name == TOKENIZER_CONFIG:
            _check_listed(path, value)
        if not is_tokenizer:
            content = json.dumps({key: value[key] for key in _KIND if key in value}).encode()
        found[path.name] = content
    return found


def hashes_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _read(folder: Path, files: Mapping[str, bytes], hashes: Mapping[str, str]) -> Tokenizer:
    tokenizer = _loaded(folder, files)
    names = tuple(Added.__dataclass_fields__)
    added = {
        int(number): Added(**{name: getattr(token, name) for name in names})
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    ids = dict(tokenizer.get_vocab())
    _check_numbers(folder, files, ids)
    return Tokenizer(folder, files, hashes, ids, added)


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer for a folder, made from files that were bounded and checked."""
    return _loaded(folder, read_files(folder))


def _transformers() -> Any:
    return require_transformers("a merge of vocabularies reads tokenizers")


def _loaded(folder: Path, files: Mapping[str, bytes]) -> Any:
    """Return transformers' tokenizer, made from checked files."""
    transformers = _transformers()
    with TemporaryDirectory(prefix="covmerge-tokenizer-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        try:
            with quiet(transformers), panics_as_errors():
                tokenizer = _load(transformers, Path(name), files)
        except Exception as error:  # untrusted files can make it fail in any way
            why = _why_no_sentencepiece(files) or (
                "transformers cannot load its tokenizer without running code of its own "
                f"({in_short(error)}): save it with a plain {TOKENIZER}"
            )
            raise InputError(f"{folder}: {why}") from error
    count = len(tokenizer.get_vocab())
    if count <= len(tokenizer.added_tokens_decoder):
        # A class makes such a tokenizer from a file that it cannot read, such as a pointer of Git LFS.
        why = _why_no_sentencepiece(files) or (
            f"transformers reads no token of its tokenizer but {count} that a {type(tokenizer).__name__} "
            "has anyhow: fetch its files again"
        )
        raise InputError(f"{folder}: {why}")
    return tokenizer


def _why_no_sentencepiece(files: Mapping[str, bytes]) -> str | None:
    """Return why a SentencePiece model cannot be read; transformers then mistakes it for tiktoken's.

    None: there is no such model, or sentencepiece can read it.
    """
    models = [name for name in files if name.endswith(_SENTENCEPIECE)]
    if TOKENIZER in files or not models:
        return None
    try:
        package: Any = importlib.import_module("sentencepiece")
    except ImportError:
        return (
            f"its tokenizer is {models[0]} without a {TOKENIZER}, and to read a SentencePiece model takes "
            f"the package sentencepiece: {INSTALL_SENTENCEPIECE}, or save it with a plain {TOKENIZER}"
        )
    for name in models:
        try:
            if not files[name]:
                raise ValueError("it is empty")
            package.SentencePieceProcessor(model_proto=files[name])
        except Exception as error:
            return (
                f"{name} is no SentencePiece model ({in_short(error)}): fetch it again, or save it with a "
                f"plain {TOKENIZER}"
            )
    return None


def _load(transformers: Any, folder: Path, files: Mapping[str, bytes]) -> Any:
    try:
        with panics_as_errors():
            return transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception:  # transformers does not know the class or the kind of model
        if TOKENIZER not in files:
            raise
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
