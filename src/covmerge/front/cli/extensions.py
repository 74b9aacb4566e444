"""Commands of other packages: functions that they announce as entry points of `covmerge.commands`.

A function is what a module of this folder has: typer's annotations, a docstring that becomes its help, and
heavy imports inside. No name of covmerge's own is given away.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from covmerge.base.errors import InputError
from covmerge.front.cli.command import Command
from covmerge.front.cli.console import say

GROUP = "covmerge.commands"
LAB = frozenset({"bank", "bench", "study", "evaluate", "reproduce", "convert"})


class OpenGroup(TyperGroup):
    """The commands of covmerge, and of the packages that are installed beside it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names; what cannot be used is left out, and named on stderr."""
        commands, refused = self._others
        for why in refused.values():
            say("warning", why)
        return [*super().list_commands(ctx), *commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None where there is no such.

        Raises:
            InputError: it is of another package, and cannot be used or is not installed.
        """
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
        """The commands of other packages by name, and why some names are none."""
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
                except Exception as error:  # importing a stranger's package may raise anything
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
