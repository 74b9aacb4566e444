"""Which of how many equal processes this one is, as the launcher says it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint

# Who started it: its variables of the number, of how many there are, of how many on this machine, and of
# the number among these.
_STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),  # torchrun and most others
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
)
# What srun says of its tasks in any case: `2(x3),1` is 2 on each of three nodes, and 1 on the next.
_TASKS, _NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
_TASKS_OF_NODES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")

_MOST_DIGITS = 9


@dataclass(frozen=True)
class Rank:
    """One of several processes that do one merge.

    Attributes:
        number: from 0; that one begins.
        world: how many there are. It decides who does what first, and nothing else.
        local: how many share this machine's memory.
        place: its number among these, which decides which GPU it takes.
    """

    number: int
    world: int
    local: int = 1
    place: int = 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world}"


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return what torchrun, Slurm or another launcher that sets their variables has made of this process.

    Raises:
        InputError: nobody has, or the numbers make no sense.

    Example:
        >>> find_rank({"SLURM_PROCID": "3", "SLURM_NTASKS": "16"})
        Rank(number=3, world=16, local=1, place=3)
    """
    for number, world, local, place in _STARTERS:
        if number in environment and world in environment:
            sharing = _tasks_here(environment) if number == "SLURM_PROCID" else None
            if sharing is None:
                sharing = _number(environment, local) if local in environment else 1
            rank = Rank(
                _number(environment, number),
                _number(environment, world),
                sharing,
                # A loop that says nothing of machines is taken to be of one.
                _number(environment, place if place in environment else number),
            )
            if rank.number >= rank.world:
                raise InputError(
                    f"{number}={rank.number} of {world}={rank.world} is no rank: they go from 0 to "
                    f"{world} - 1"
                )
            if not rank.local:
                raise InputError(
                    f"{_TASKS if _TASKS in environment else local} is 0, and counts the ranks of this "
                    "machine: set it right"
                )
            return rank
    names = " nor ".join(f"{number} and {world}" for number, world, *_ in _STARTERS)
    raise InputError(
        f"{Hint('executor', 'ranks')}: neither {names} is set. Start the merge by srun or torchrun, or "
        "set RANK and WORLD_SIZE"
    )


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """How many tasks of the step run on this node; None: Slurm says nothing of it."""
    if _TASKS not in environment or _NODE not in environment:
        return None
    text, node = environment[_TASKS], _number(environment, _NODE)
    for part in text.split(","):
        match = _TASKS_OF_NODES.fullmatch(part)
        if match is None:
            raise InputError(f"{_TASKS} is '{text[:40]}', and should be as in 2(x3),1")
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise InputError(f"{_TASKS}={text[:40]} has no node {_NODE}={environment[_NODE]}")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise InputError(f"{name} is '{text[:20]}', and should be a whole number")
    return int(text)
