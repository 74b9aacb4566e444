"""The command classes: options given once, commands of other packages, mergekit's flags of `merge`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from covmerge.base.errors import InputError, RecipeError
from covmerge.front.cli.console import say
from covmerge.front.cli.outcome import ReportingGroup

# Commands of covmerge: an option that takes one value may be given once.


class Command(TyperCommand):
    """A command that refuses a repeated option of one value; click would use the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise an error for repeated options, then parse the arguments."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option, count in Counter(order).items():
            if (
                isinstance(option, TyperOption)
                and not (option.multiple or option.is_flag)
                and count > 1
            ):
                raise InputError(
                    f"{option.opts[0]} stands {count} times, and takes one value: leave out the others"
                )
        return super().parse_args(ctx, args)


# Commands of other packages: functions that the packages announce as entry points of
# `covmerge.commands`.
#
# Such a function looks like those in the modules of this folder: it has typer's annotations, a
# docstring that becomes its help, and its heavy imports inside. It cannot replace a command of
# covmerge.

GROUP = "covmerge.commands"
LAB = frozenset({"bank", "bench", "study", "evaluate", "reproduce", "convert"})


class AllCommands(ReportingGroup):
    """The group of covmerge's commands and those of other installed packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands; warn on stderr of those that cannot be used."""
        commands, refused = self._others
        for why in refused.values():
            say("warning", why)
        return [*super().list_commands(ctx), *commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name."""
        if cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        commands, refused = self._others
        if cmd_name in refused:
            raise InputError(refused[cmd_name])
        if cmd_name in LAB - commands.keys():
            raise InputError(
                f"`covmerge {cmd_name}` is in a package of its own, which is not installed: "
                "pip install covmerge-lab"
            )
        return commands.get(cmd_name)

    @cached_property
    def _others(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the commands of other packages by name, and the reasons why others cannot be used."""
        commands: dict[str, Any] = {}
        refused: dict[str, str] = {}
        announced: defaultdict[str, list[EntryPoint]] = defaultdict(list)
        for entry in entry_points(group=GROUP):
            announced[entry.name].append(entry)
        for name, entries in announced.items():
            packages = " and ".join(map(_package, entries))
            if name in self.commands:
                refused[name] = (
                    f"the command '{name}' of {packages} is left out: covmerge has one of that name"
                )
            elif len(entries) > 1:
                refused[name] = f"{packages} both have a command '{name}': uninstall one of them"
            else:
                try:
                    commands[name] = _command(entries[0])
                except Exception as error:  # importing another package may raise any exception
                    reason = (str(error).strip().splitlines() or [""])[0]
                    refused[name] = (
                        f"the command '{name}' of {packages} cannot be used "
                        f"({type(error).__name__}: {reason}): install that package again, or "
                        "uninstall it"
                    )
        return commands, refused


def _command(entry: EntryPoint) -> Any:
    app = typer.Typer(add_completion=False)
    panel = f"Commands of {_package(entry)}"
    app.command(entry.name, cls=Command, rich_help_panel=panel)(entry.load())
    return typer.main.get_command(app)


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


# mergekit's flags of `covmerge merge`: translated, reported as without effect, or refused.

# Short options with their value in one word, as click accepts them, and any number of `-v`.
_SHORT = re.compile(r"(-[jI])([^=].*)")
_VERBOSE = re.compile(r"-v+")
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9}

# Switches with another name in covmerge.
_AS: Mapping[str, Sequence[str]] = {
    "--cuda": ("--device", "cuda"),
    "--gpu-rich": ("--device", "cuda"),
    "--unsafe-truncate-embeddings": ("--tensors", "vocabulary=base"),
    "--lazy": ("--resume",),
    "--no-lazy": ("--overwrite",),
}
# Options with a value that have another name in covmerge.
_RENAMED = {
    "--num-threads": "--threads",
    "-j": "--threads",
    "--random-seed": "--seed",
    "--intermediate-dir": "--stages",
    "-I": "--stages",
}
_OUT = "--out-path"
_SHARD_SIZE = "--out-shard-size"
# covmerge does what these ask for in any case, or they do not apply.
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
    """A command that accepts mergekit's flags beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate mergekit's flags to covmerge's, then parse the arguments."""
        return super().parse_args(ctx, translated(args))


def translated(args: Sequence[str]) -> list[str]:
    """Return arguments with mergekit's flags translated to covmerge's.

    Raises:
        RecipeError: a flag has no counterpart in covmerge; the message says what replaces it.

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
        elif flag == _OUT:  # in covmerge it is the last of the paths
            out = value if equals else next(rest, "")
        elif flag == _SHARD_SIZE:
            found += ["--shard-size", _bytes(value if equals else next(rest, ""))]
        else:
            found.append(arg)
    if without_effect:
        say("note", f"mergekit's {', '.join(without_effect)}: without effect in covmerge")
    return found if out is None else [*found, out]


def _bytes(size: str) -> str:
    """Return a size as a number of bytes; mergekit speaks of parameters, but counts bytes."""
    factor = _SUFFIXES.get(size[-1:].lower())
    number = size[:-1] if factor else size
    if not number.isdecimal():
        raise RecipeError(f"{_SHARD_SIZE} {size!r} is not a number with K, M or B, such as 5B")
    return str(int(number) * (factor or 1))
