"""Machines as somebody describes them: `nodes=16,gpus=8,nic=25GB/s,disk=7GB/s`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from covmerge.base.errors import InputError, RecipeError, did_you_mean
from covmerge.maths.linalg.auto import eigen_share
from covmerge.plan.recipe import parse_size

# Guesses where nothing is said. A core's SHA-256, by the instructions that processors have for it.
_HASHED = 1.5e9
# Products in float32. What a GPU has on paper is more.
_CORE, _GPU = 5e10, 2.5e13
# Operations in eigenproblems, as a share of the rate of products: on a CPU 0.7 to 0.9 of 512 rows and more,
# on a GPU what an H100 does of large matrices: of 768 rows it takes six times as long.
_EIGEN, _EIGEN_GPU = 0.8, eigen_share("cuda")
# What a core of a CPU converts to float32, scales and adds up, of bytes as they are stored.
_STREAMED, _STREAMED_GPU = 1.5e9, 5e11
# Seconds that a process takes to start, to plan by headers and to publish: of a small merge here.
_STARTS = 4.0
_RATE = re.compile(r"\s*/\s*s(?:ec)?\Z")
_FLOPS = re.compile(
    r"([0-9.]{1,20}(?:e[0-9]{1,2})?)([kMGTP]?)(?:F|FLOPS?|FLOP/s|F/s)?", re.IGNORECASE
)
_SECONDS = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,9})?) ?s")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True)
class Hardware:
    """What a merge is to run on.

    Attributes:
        nodes: machines, of which each is like the others.
        gpus: of a node; 0: the mathematics runs on its cores.
        cores: of a node.
        nic: bytes a second over a node's network, each way; None: the files lie on the node.
        disk: bytes a second that a node reads or writes where the files are.
        storage: bytes a second that all nodes together get from where the files are; None: no limit.
        memory: bytes of a node; None: enough.
        flops: floating-point operations a second in products, of a GPU, or of all cores of a node.
        eigen: the same in eigenproblems and singular values, counted as the plan counts them.
        stream: bytes a second that the same converts and adds up.
        hash: bytes a second of SHA-256, of a core.
        start: seconds that a process takes to start, to plan and to publish.
    """

    nodes: int = 1
    gpus: int = 0
    cores: int = 16
    nic: float | None = None
    disk: float = 2e9
    storage: float | None = None
    memory: int | None = None
    flops: float = 0.0
    eigen: float = 0.0
    stream: float = 0.0
    hash: float = _HASHED
    start: float = _STARTS

    @property
    def workers(self) -> int:
        """Processes of a node that share the work, each with a device of its own."""
        return max(1, self.gpus)

    @property
    def device_flops(self) -> float:
        """Operations a second of the device of a worker."""
        return self.flops or (_GPU if self.gpus else _CORE * self.cores)

    @property
    def device_eigen(self) -> float:
        """Operations a second of it in eigenproblems."""
        return self.eigen or self.device_flops * (_EIGEN_GPU if self.gpus else _EIGEN)

    @property
    def device_stream(self) -> float:
        """Bytes a second that it adds up."""
        return self.stream or (_STREAMED_GPU if self.gpus else _STREAMED * self.cores)

    @property
    def links(self) -> dict[str, float]:
        """What lies between a node and the files: bytes a second of each."""
        return {"disk": self.disk, **({} if self.nic is None else {"nic": self.nic})}

    @property
    def rates(self) -> dict[str, float]:
        """The same of these links, and of the storage that all nodes share."""
        return {**self.links, **({} if self.storage is None else {"storage": self.storage})}


def parse_hardware(text: str) -> Hardware:
    """Read `nodes=16,gpus=8,nic=25GB/s,disk=7GB/s,flops=60TFLOPS,memory=2TB`.

    Raises:
        InputError: an unknown key, a key twice, or no number; it names the nearest one.

    Example:
        >>> parse_hardware("nodes=16,gpus=8,nic=25GB/s,disk=7GB/s").links
        {'disk': 7000000000.0, 'nic': 25000000000.0}
    """
    known = [field.name for field in fields(Hardware)]
    given: dict[str, int | float] = {}
    for entry in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or key not in known:
            raise InputError(
                f"--cluster {entry!r} is none of {', '.join(f'{name}=' for name in known)}."
                + did_you_mean(key, known)
            )
        if key in given:
            raise InputError(f"--cluster says {key}= twice")
        try:
            given[key] = _PARSERS[key](value)
        except (ValueError, RecipeError) as error:
            raise InputError(f"--cluster {entry!r}: {error}") from error
    return Hardware(**given)  # pyright: ignore[reportArgumentType]


def _count(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,7}", value) or int(value) < least:
            raise ValueError(f"it must be a whole number from {least} to 9999999")
        return int(value)

    return parse


def _rate(value: str) -> float:
    if value[-1:].isdigit():
        raise ValueError("write bytes a second with their unit, such as 25GB/s")
    return float(parse_size(_RATE.sub("", value)))


def _flops(value: str) -> float:
    match = _FLOPS.fullmatch(value)
    rate = float(match[1]) * _PREFIXES[match[2].lower()] if match else 0.0
    if not 0.0 < rate < 1e30:
        raise ValueError("write operations a second, such as 60TFLOPS or 2.5e13")
    return rate


def _seconds(value: str) -> float:
    match = _SECONDS.fullmatch(value)
    if match is None:
        raise ValueError("write seconds, such as 2.5s")
    return float(match[1])


_PARSERS: dict[str, Callable[[str], int | float]] = {
    **{"nodes": _count(1), "gpus": _count(0), "cores": _count(1), "memory": parse_size},
    **dict.fromkeys(("nic", "disk", "storage", "stream", "hash"), _rate),
    **dict.fromkeys(("flops", "eigen"), _flops),
    "start": _seconds,
}
