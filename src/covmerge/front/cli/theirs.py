"""mergekit's flags of `covmerge merge`: as ours, taken where they need nothing, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from covmerge.base.errors import RecipeError
from covmerge.front.cli.console import say

# Short options with their value in one word, as click takes them, and any number of `-v`.
_SHORT = re.compile(r"(-[jI])([^=].*)")
_VERBOSE = re.compile(r"-v+")
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9}

# Switches that are ours by other words.
_AS: Mapping[str, Sequence[str]] = {
    "--cuda": ("--device", "cuda"),
    "--gpu-rich": ("--device", "cuda"),
    "--unsafe-truncate-embeddings": ("--tensors", "vocabulary=base"),
    "--lazy": ("--resume",),
    "--no-lazy": ("--overwrite",),
}
# Options with a value that are ours by another name.
_RENAMED = {
    "--num-threads": "--threads",
    "-j": "--threads",
    "--random-seed": "--seed",
    "--intermediate-dir": "--stages",
    "-I": "--stages",
}
_OUT = "--out-path"
_SHARD_SIZE = "--out-shard-size"
_SAYS = "a merge always says the same; 2>/dev/null hides its progress"
# Switches that ask for what is done anyhow, or for what does not arise: with the reason.
_ALREADY = {
    "--copy-tokenizer": "the tokenizer is always copied",
    "--write-model-card": "a model card is always written",
    "--safe-serialization": "nothing but safetensors is written",
    "--lazy-unpickle": "pickled files are read without being run, tensor by tensor",
    "--clone-tensors": "tensors share no memory in the output",
    "--allow-crimes": "tensors are matched by names and shapes, whatever the architecture",
    "--trust-remote-code": "no code of a model is ever run",
    "--low-cpu-memory": "a merge streams; --max-memory bounds it",
    "--read-to-gpu": "a merge streams; --max-memory bounds it",
    "--async-write": "results are written while others are computed",
    "--no-clone-tensors": "",
    "--no-trust-remote-code": "",
    "--no-allow-crimes": "",
    "--no-cuda": "",
    "--no-low-cpu-memory": "",
    "--no-lazy-unpickle": "",
    "--no-read-to-gpu": "",
    "--no-multi-gpu": "",
    "--no-async-write": "",
    "--no-unsafe-truncate-embeddings": "",
    "--quiet": _SAYS,
    "--no-quiet": _SAYS,
}
_ALREADY_WITH_VALUE = {
    "--lora-merge-cache": "adapters are merged as they are, and no cache is written",
    "--lora-merge-dtype": "adapters are multiplied out in the dtype of the computation",
    "--write-threads": "results are written while others are computed",
}
_REFUSED = {
    "--multi-gpu": "one device is used: --device cuda:0",
    "--no-copy-tokenizer": "the base's tokenizer is always copied: remove its files from the output",
    "--no-write-model-card": "a model card is always written: remove README.md, which no check asks for",
    "--no-safe-serialization": "nothing but safetensors is written",
    "--transformers-cache": "models of the Hub lie in its own cache: set HF_HOME",
}


class TakesTheirFlags(TyperCommand):
    """A command that knows mergekit's flags beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write mergekit's flags as ours, then go on."""
        return super().parse_args(ctx, translated(args))


def translated(args: Sequence[str]) -> list[str]:
    """Return arguments with mergekit's flags as ours.

    Raises:
        RecipeError: a flag that has no meaning here; the message says what replaces it.

    Example:
        >>> translated(["r.yml", "OUT", "--cuda", "--random-seed", "42", "--out-shard-size=2B"])
        ['r.yml', 'OUT', '--device', 'cuda', '--seed', '42', '--shard-size', '2000000000']
    """
    found: list[str] = []
    out: str | None = None
    rest = iter(args)
    for arg in rest:
        short = _SHORT.fullmatch(arg)
        flag, equals, value = (short[1], "=", short[2]) if short else arg.partition("=")
        if flag in _REFUSED:
            raise RecipeError(f"{flag} is mergekit's, and covmerge has none: {_REFUSED[flag]}")
        if flag in _AS:
            found += _AS[flag]
        elif flag in _ALREADY:
            if _ALREADY[flag]:
                say("note", f"{flag} changes nothing: {_ALREADY[flag]}")
        elif flag in _ALREADY_WITH_VALUE:
            if not equals:
                next(rest, None)
            say("note", f"{flag} changes nothing: {_ALREADY_WITH_VALUE[flag]}")
        elif _VERBOSE.fullmatch(arg):
            say("note", f"{arg} changes nothing: {_SAYS}")
        elif flag in _RENAMED:
            found += [_RENAMED[flag], value if equals else next(rest, "")]
        elif flag == _OUT:  # here the last of the paths
            out = value if equals else next(rest, "")
        elif flag == _SHARD_SIZE:
            found += ["--shard-size", _bytes(value if equals else next(rest, ""))]
        else:
            found.append(arg)
    return found if out is None else [*found, out]


def _bytes(size: str) -> str:
    """Mergekit says parameters and counts bytes; so are its sizes read here."""
    factor = _SUFFIXES.get(size[-1:].lower())
    number = size[:-1] if factor else size
    if not number.isdecimal():
        raise RecipeError(f"{_SHARD_SIZE} {size!r} is not a number with K, M or B, such as 5B")
    return str(int(number) * (factor or 1))
