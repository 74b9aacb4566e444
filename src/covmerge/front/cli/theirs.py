"""mergekit's flags of `covmerge merge`: as ours, named where they have no effect, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from covmerge.base.errors import RecipeError
from covmerge.front.cli.command import Command
from covmerge.front.cli.console import say

# Short options with their value in one word, as click takes them, and any number of `-v`.
_SHORT = re.compile(r"(-[jI])([^=].*)")
_VERBOSE = re.compile(r"-v+")
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9}

# Switches that have another name here.
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
# What these ask for is done anyhow, or does not arise.
_WITHOUT_EFFECT = (
    "--copy-tokenizer", "--write-model-card", "--safe-serialization", "--lazy-unpickle",
    "--clone-tensors", "--allow-crimes", "--trust-remote-code", "--low-cpu-memory", "--read-to-gpu",
    "--async-write", "--quiet", "--no-clone-tensors", "--no-trust-remote-code", "--no-allow-crimes",
    "--no-cuda", "--no-low-cpu-memory", "--no-lazy-unpickle", "--no-read-to-gpu", "--no-multi-gpu",
    "--no-async-write", "--no-quiet", "--no-unsafe-truncate-embeddings",
)  # fmt: skip
_WITHOUT_EFFECT_WITH_VALUE = ("--lora-merge-cache", "--lora-merge-dtype", "--write-threads")
_REFUSED = {
    "--multi-gpu": "one device is used: --device cuda:0",
    "--no-copy-tokenizer": "the base's tokenizer is always copied: remove its files in a copy of the base",
    "--no-write-model-card": "a model card is always written: remove README.md, which no check asks for",
    "--no-safe-serialization": "nothing but safetensors is written",
    "--transformers-cache": "models of the Hub lie in its own cache: set HF_HOME",
}


class TakesTheirFlags(Command):
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
    without_effect: list[str] = []
    out: str | None = None
    rest = iter(args)
    for arg in rest:
        short = _SHORT.fullmatch(arg)
        flag, equals, value = (short[1], "=", short[2]) if short else arg.partition("=")
        if flag in _REFUSED:
            raise RecipeError(f"{flag} is mergekit's, and covmerge has none: {_REFUSED[flag]}")
        if flag in _AS:
            found += _AS[flag]
        elif flag in _WITHOUT_EFFECT or _VERBOSE.fullmatch(arg):
            without_effect.append(arg)
        elif flag in _WITHOUT_EFFECT_WITH_VALUE:
            without_effect.append(flag)
            if not equals:
                next(rest, None)
        elif flag in _RENAMED:
            found += [_RENAMED[flag], value if equals else next(rest, "")]
        elif flag == _OUT:  # here the last of the paths
            out = value if equals else next(rest, "")
        elif flag == _SHARD_SIZE:
            found += ["--shard-size", _bytes(value if equals else next(rest, ""))]
        else:
            found.append(arg)
    if without_effect:
        say("note", f"mergekit's {', '.join(without_effect)}: without effect in covmerge")
    return found if out is None else [*found, out]


def _bytes(size: str) -> str:
    """Mergekit says parameters and counts bytes; so are its sizes read here."""
    factor = _SUFFIXES.get(size[-1:].lower())
    number = size[:-1] if factor else size
    if not number.isdecimal():
        raise RecipeError(f"{_SHARD_SIZE} {size!r} is not a number with K, M or B, such as 5B")
    return str(int(number) * (factor or 1))
