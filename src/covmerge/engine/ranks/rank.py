"""Which of how many equal processes this one is, as whoever started them says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from covmerge.errors import InputError

# Who started it: its variables of the number, of how many there are, and of how many on this machine.
_STARTERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun and most others
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)

_MOST_DIGITS = 9


@dataclass(frozen=True)
class Rank:
    """One of several processes that do one merge.

    Attributes:
        number: from 0; that one begins.
        world: how many there are. It decides who does what first, and nothing else.
        local: how many share this machine's memory.
    """

    number: int
    world: int
    local: int = 1

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world}"


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return what torchrun, Slurm or whoever sets their variables has made of this process.

    Raises:
        InputError: nobody has, or the numbers make no sense.

    Example:
        >>> find_rank({"SLURM_PROCID": "3", "SLURM_NTASKS": "16"})
        Rank(number=3, world=16, local=1)
    """
    for number, world, local in _STARTERS:
        if number in environment and world in environment:
            rank = Rank(
                _number(environment, number),
                _number(environment, world),
                _number(environment, local) if local in environment else 1,
            )
            if rank.number >= rank.world:
                raise InputError(
                    f"{number}={rank.number} of {world}={rank.world} is no rank: they go from 0 to "
                    f"{world} - 1"
                )
            if not rank.local:
                raise InputError(
                    f"{local} is 0, and counts the ranks of this machine: set it right"
                )
            return rank
    names = " nor ".join(f"{number} and {world}" for number, world, _ in _STARTERS)
    raise InputError(
        f"--executor ranks: neither {names} is set. Start the merge by srun or torchrun, or set RANK "
        "and WORLD_SIZE"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise InputError(f"{name} is '{text[:20]}', and should be a whole number")
    return int(text)
