"""The numbers that a tokenizer's files give to added tokens: what they must be, and that they are kept."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import InputError, panics_as_errors
from covmerge.files.checkpoints.json_file import parse_object, shorten

ADDED_TOKENS = "added_tokens.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# What transformers and tokenizers count tokens with; a row is two bytes or more, so no table has as many.
_MOST_ROWS = 2**32
_MOST_DIGITS = 10


def check_added(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse an added_tokens.json that gives a token no number, or two tokens one.

    transformers would fail somewhere else, or give another number without a word.

    Raises:
        InputError: it does.
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
    """Refuse a tokenizer_config.json whose list of tokens is none, or has one under what is no number.

    Raises:
        InputError: it does.
    """
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

    Args:
        folder: of the tokenizer.
        files: of it, checked.
        ids: the number of every token, as transformers reads it.

    Raises:
        InputError: there is such a token.
    """
    known: Mapping[str, int] | None = None
    for name, token, number in _stated(folder, files):
        if ids.get(token) == number:
            continue
        if TOKENIZER in files:
            # That file goes before the others, but says nothing of tokens that it lacks.
            known = _of_json(folder, files[TOKENIZER]) if known is None else known
            if token in known or token not in ids:
                continue
        read = "none" if token not in ids else str(ids[token])
        raise InputError(
            f"{folder / name} gives {shorten(token)} the number {shorten(number)}, and transformers "
            f"reads {read}: its row would be taken for another token's. Save the tokenizer "
            f"with a {TOKENIZER} that has these numbers, or leave out `tokenizer`"
        )


def _of_json(folder: Path, content: bytes) -> Mapping[str, int]:
    tokenizers: Any = importlib.import_module("tokenizers")  # transformers' own
    try:
        with panics_as_errors():
            made = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # it has no class of errors of its own
        raise InputError(
            f"{folder / TOKENIZER} is no tokenizer to the library tokenizers: save the model anew"
        ) from error
    return made.get_vocab(with_added_tokens=True)


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
