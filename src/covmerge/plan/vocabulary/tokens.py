"""A model's tokenizer, as transformers loads it: its tokens, and which of them were added."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
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

# The numbers that a tokenizer's files give to added tokens: what they must be, and that they are kept.

ADDED_TOKENS = "added_tokens.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# What transformers and tokenizers count tokens with; a row is two bytes or more, so no table has as many.
_MOST_ROWS = 2**32
_MOST_DIGITS = 10


def check_added(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse an added_tokens.json that gives a token no number, or two tokens one.

    transformers would fail somewhere else, or give another number without a word.
    """
    tokens: dict[int, str] = {}
    for token, number in content.items():
        if not token:
            raise InputError(
                f"{path} gives the empty text the number {shorten(number)}, and no token is empty: "
                "remove it"
            )
        # A truth value is an int to Python, and 340.0 another spelling of a number to JSON.
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


def check_listed(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a tokenizer_config.json whose list of tokens is none, or has one under what is no number."""
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


def check_numbers(folder: Path, files: Mapping[str, bytes], ids: Mapping[str, int]) -> None:
    """Refuse numbers of added tokens that are not the files': those tell which rows were trained as which.

    transformers gives added tokens the next free numbers, where its older releases went by the files.
    """
    known: Mapping[str, int] | None = None
    for name, token, number in _stated(folder, files):
        if ids.get(token) == number:
            continue
        if TOKENIZER in files:
            # That file goes before the others, but says nothing of tokens that it lacks.
            known = _vocab_of_json(folder, files[TOKENIZER]) if known is None else known
            if token in known or token not in ids:
                continue
        read = "none" if token not in ids else str(ids[token])
        raise InputError(
            f"{folder / name} gives {shorten(token)} the number {shorten(number)}, and transformers "
            f"reads {read}: its row would be taken for another token's. Save the tokenizer "
            f"with a {TOKENIZER} that has these numbers, or leave out `tokenizer`"
        )


def _vocab_of_json(folder: Path, content: bytes) -> Mapping[str, int]:
    return _parsed(folder, content).get_vocab(with_added_tokens=True)


def _parsed(folder: Path, content: bytes) -> Any:
    """The library tokenizers' tokenizer of a tokenizer.json."""
    tokenizers: Any = importlib.import_module("tokenizers")  # transformers' own
    try:
        with panics_as_errors():
            return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # it has no class of errors of its own
        raise InputError(
            f"{folder / TOKENIZER} is no tokenizer to the library tokenizers: save the model anew"
        ) from error


def _stated(folder: Path, files: Mapping[str, bytes]) -> Iterator[tuple[str, str, int]]:
    """The tokens to which files give numbers: the file, the token, the number."""
    if ADDED_TOKENS in files:
        content = parse_object(files[ADDED_TOKENS], str(folder / ADDED_TOKENS))
        yield from ((ADDED_TOKENS, token, number) for token, number in content.items())
    # Of what stands beside tokenizer.json, that is a copy.
    if TOKENIZER_CONFIG not in files or TOKENIZER in files:
        return
    name = TOKENIZER_CONFIG
    for number, token in _listed(parse_object(files[name], str(folder / name))):
        yield name, token, int(number)


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers and tokens of tokenizer_config.json, as they stand there."""
    decoder: Any = config.get("added_tokens_decoder")
    given = cast("dict[str, Any]", decoder) if isinstance(decoder, dict) else {}
    for number, raw in given.items():
        token: Any = cast("dict[str, Any]", raw).get("content") if isinstance(raw, dict) else None
        if isinstance(token, str):
            yield number, token


# A SentencePiece model under a name that mistral-common alone knows.
_MISTRALS = "*.model.v[0-9]*"
# Whatever belongs to a tokenizer, at the top of a folder.
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
# By one of these transformers knows the tokens.
_VOCABULARIES = (TOKENIZER, "vocab*", "tekken.json", "*.model", "*.spm", "*.tiktoken")
# Tells the kind of tokenizer where nothing else does.
_CONFIG, _KIND = "config.json", ("model_type",)
_MOST_HOLES = 1024
_SENTENCEPIECE = (".model", ".spm")
INSTALL_SENTENCEPIECE = "pip install 'covmerge[sentencepiece]'"


@dataclass(frozen=True)
class Added:
    """A token that was added to a tokenizer, and how it is found in a text."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.

    Attributes:
        folder: where it lies.
        files: its files, as they were read.
        hashes: of the files.
        ids: the number of every token.
        added: tokens that were added to its model, by number.
    """

    folder: Path
    files: Mapping[str, bytes] = field(repr=False)
    hashes: Mapping[str, str]
    ids: Mapping[str, int] = field(repr=False)
    added: Mapping[int, Added]

    @cached_property
    def end(self) -> int:
        """One more than the largest number of a token.

        Raises:
            InputError: so many numbers below it are of no token that no embedding has as many rows.
        """
        end = max(self.ids.values(), default=-1) + 1
        if end > 2 * len(self.ids) + _MOST_HOLES:
            raise InputError(
                f"{self.folder}: its tokenizer has {len(self.ids)} tokens, and one of them the number "
                f"{end - 1}: correct {TOKENIZER}"
            )
        return end

    def extended(self, more: Sequence[Added]) -> tuple[dict[str, int], bytes]:
        """Return the numbers of its tokens and of more, and the tokenizer.json that has them all."""
        tokenizer, transformers = _loaded(self.folder, self.files)
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
        """Its own tokenizer.json with more tokens; None: there is none, or it would not have them so.

        What transformers makes of it may be another, such as that of the class which a config names.
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
    """Return by what two tokenizers cut a text otherwise, as tokenizer.json calls it.

    Nothing is known of one without that file. Of merges and scores those of pieces that both have count.
    """
    if TOKENIZER not in one.files or TOKENIZER not in other.files or one.hashes == other.hashes:
        return []
    # Other releases leave out what has its default, or write merges as texts: this writes all, in one way.
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
    pieces = [dict(m["vocab"]) for m in models]  # piece -> number, or score
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
    """A part of a tokenizer.json without what decides on offsets alone."""
    if isinstance(part, list):
        return [_without_offsets(one) for one in cast("list[Any]", part)]
    if isinstance(part, dict):
        fields = cast("dict[str, Any]", part).items()
        return {key: _without_offsets(value) for key, value in fields if key != "trim_offsets"}
    return part


class Reader:
    """Reads tokenizers, each only once however many models have it."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[tuple[str, str], ...], Tokenizer] = {}

    def read(self, folder: Path | None) -> Tokenizer | None:
        """Return the tokenizer in a folder; None: there is none.

        Raises:
            InputError: it cannot be read, or transformers is missing.
            CheckpointError: a file is too large, leads out of the folder, or is no JSON object.
        """
        files = {} if folder is None else read_files(folder)
        if folder is None or not files:
            return None
        hashes = hashes_of(files)
        key = tuple(sorted(hashes.items()))
        if key not in self._tokenizers:
            self._tokenizers[key] = _read(folder, files, hashes)
        known = self._tokenizers[key]
        return replace(known, folder=folder)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer with their content; none where there is no vocabulary.

    Raises:
        CheckpointError: a file is too large, leads out of the folder, or is no JSON object.
        InputError: its tokens are in a file that transformers does not know, or numbers of them are none.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if any(matches_any(name, _VOCABULARIES) for name in names):
        return dict(_read_files(folder))
    for name in names:
        if fnmatchcase(
            name, _MISTRALS
        ):  # a model without its tokens would be taken to have others'
            plain, _, _ = name.rpartition(".v")
            raise InputError(
                f"{folder / name} is the only file with the tokens of this model, and transformers reads "
                f"none of this name: copy it to {plain} beside it, or save the model with a {TOKENIZER}"
            )
    return {}


def hashes_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _read_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.iterdir()):
        is_tokenizer = matches_any(path.name, TOKENIZER_FILES)
        if not path.is_file() or not (is_tokenizer or path.name == _CONFIG):
            continue
        content = read_regular(safe_child(folder, path.name), MAX_JSON_BYTES)
        # What is parsed again by others is checked first: they are less careful.
        value = parse_object(content, str(path)) if path.suffix == ".json" else {}
        if path.name == ADDED_TOKENS:
            check_added(path, value)
        if path.name == TOKENIZER_CONFIG:
            check_listed(path, value)
        if not is_tokenizer:
            content = json.dumps({key: value[key] for key in _KIND if key in value}).encode()
        yield path.name, content


def _read(folder: Path, files: Mapping[str, bytes], hashes: Mapping[str, str]) -> Tokenizer:
    tokenizer, _ = _loaded(folder, files)
    names = tuple(Added.__dataclass_fields__)
    added = {
        int(number): Added(**{name: getattr(token, name) for name in names})
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    ids = dict(tokenizer.get_vocab())
    check_numbers(folder, files, ids)
    return Tokenizer(folder, files, hashes, ids, added)


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder, of bytes that were bounded and checked."""
    return _loaded(folder, read_files(folder))[0]


def _loaded(folder: Path, files: Mapping[str, bytes]) -> tuple[Any, Any]:
    """A tokenizer of transformers', made of bytes that were checked, and transformers."""
    transformers = require_transformers("a merge of vocabularies reads tokenizers")
    with TemporaryDirectory(prefix="covmerge-tokenizer-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        try:
            with quiet(transformers), panics_as_errors():
                tokenizer = _load(transformers, Path(name), files)
        except Exception as error:  # a stranger's files can make it fail in any way
            why = _why_no_sentencepiece(files) or (
                "transformers cannot load its tokenizer without running code of its own "
                f"({in_short(error)}): save it with a plain {TOKENIZER}"
            )
            raise InputError(f"{folder}: {why}") from error
    count = len(tokenizer.get_vocab())
    if count <= len(tokenizer.added_tokens_decoder):
        # What a class makes of a file that it cannot read: a pointer of Git LFS, mostly.
        why = _why_no_sentencepiece(files) or (
            f"transformers reads no token of its tokenizer but {count} that a {type(tokenizer).__name__} "
            "has anyhow: fetch its files again"
        )
        raise InputError(f"{folder}: {why}")
    return tokenizer, transformers


def _why_no_sentencepiece(files: Mapping[str, bytes]) -> str | None:
    """Why a SentencePiece model is not read, which transformers then takes for one of tiktoken's.

    None: there is none, or sentencepiece reads it.
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
    except Exception:  # a class, or a kind of model, that transformers does not know
        if TOKENIZER not in files:
            raise
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
