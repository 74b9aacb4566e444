"""What becomes of merges whose sources or machine go wrong, as one table.

A kind is a function of an empty folder and random numbers. It runs one merge, and returns what `judge`
says of it. The result is compared with a float64 computation of the campaign's own, and not with
covmerge's `verify`. A trial is drawn by kind, seed and number: `--kind NAME --first NUMBER --count 1`
makes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tests.campaigns.disturbed import Child, Ended

REFUSED, RIGHT = "refused by name", "finished right"
WRONG, TRACEBACK, HUNG = "finished and wrong", "traceback or no name", "hung"
LEFT = "left what looks finished"
OUTCOMES = (REFUSED, RIGHT, WRONG, TRACEBACK, HUNG, LEFT)
_FAILURES = (WRONG, TRACEBACK, HUNG, LEFT)
_FINISHED = ("covmerge.json", "config.json", "adapter_config.json", "model.safetensors.index.json")
_ARITHMETIC = 8 * torch.finfo(torch.float32).eps  # of the largest value: a merge of a few experts

Tensors = Mapping[str, Tensor]
Verdict = tuple[str, str]  # an outcome, and what to read of it
Kind = Callable[[Path, Random], Verdict]


@dataclass
class Tally:
    """What became of the trials of one kind.

    Attributes:
        counts: how many had each outcome.
        failures: by the number of a trial, what to read of it.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


def models(random: Random, width: int = 16, layers: int = 3) -> dict[str, dict[str, Tensor]]:
    """Return a base, and experts `a` and `b` that are fine-tunes of it."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    shapes = {f"layers.{n}.proj.weight": (width, width) for n in range(layers)}
    base = {
        name: torch.randn(shape, generator=generator)
        for name, shape in {**shapes, "norm.weight": (width,)}.items()
    }
    tuned = {
        expert: {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        for expert in "ab"
    }
    return {"base": base, **tuned}


def recipe(folder: Path, **sources: object) -> Path:
    """Write the recipe of an average of `base`, `a` and `b` into a folder, and return its path."""
    named = {name: str(source) for name, source in sources.items()}
    told = {"base": named.pop("base"), "experts": named, "method": "average"}
    (folder / "recipe.yml").write_text(json.dumps(told))
    return folder / "recipe.yml"


def average(*experts: Tensors) -> dict[str, Tensor]:
    """Return the mean of the experts in float64: what the method `average` is to write."""
    return {
        name: torch.stack([own[name].double() for own in experts]).mean(0) for name in experts[0]
    }


def covmerge(home: Path, *arguments: object, **how: Any) -> Ended:
    """Run the command line in a process forked off this one; `how` it is made: see `Child`."""
    (home / "tmp").mkdir(exist_ok=True)
    return Child(home, [str(own) for own in arguments], **how).wait()


def judge(
    ended: Ended,
    out: Path,
    right: Tensors | None,
    names: Collection[str],
    files: Mapping[str, bytes] | None = None,
) -> Verdict:
    """Return what became of a merge.

    Args:
        ended: how its process ended.
        out: where its output is to be.
        right: the tensors that it is to have, in float64; None: it is to be refused.
        names: an error is to have one of them.
        files: other files that the output is to have, by name.
    """
    if "it hung" in ended.said:
        return HUNG, ended.said
    if ended.code == 0:
        fault = "it is to be refused" if right is None else difference(out, right)
        fault = fault or _other_file(out, files or {})
        return (RIGHT, "") if fault is None else (WRONG, f"{fault}\n{ended.said}")
    if not (ended.named and any(name in ended.said for name in names)):
        return TRACEBACK, f"exit code {ended.code}\n{ended.said}"
    if left := [name for name in _FINISHED if (out / name).exists()]:
        return LEFT, f"{left}\n{ended.said}"
    return REFUSED, ended.said


def difference(out: Path, right: Tensors) -> str | None:
    """Return what of an output's tensors is not as it should be; None: nothing."""
    found: dict[str, Tensor] = {}
    for path in out.glob("*.safetensors"):
        try:
            found |= load_file(path)
        except SafetensorError as error:
            return f"{path.name}: {error}"
    if found.keys() != right.keys():
        return f"tensors {sorted(found.keys() ^ right.keys())[:5]} are in one of the two alone"
    for name, wanted in right.items():
        own = found[name]
        if own.shape != wanted.shape:
            return f"{name}: shape {list(own.shape)}, not {list(wanted.shape)}"
        rounding = torch.finfo(own.dtype).eps / 2 if own.is_floating_point() else 0.0
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        off = (own.double() - wanted).abs() - rounding * wanted.abs() - _ARITHMETIC * largest
        if off.numel() and not float(off.max()) <= 0:  # NaN too
            return f"{name}: an element is {float(off.max()):.3g} further off than its rounding"
    return None


def _other_file(out: Path, files: Mapping[str, bytes]) -> str | None:
    for name, content in files.items():
        if not (out / name).is_file() or (out / name).read_bytes() != content:
            return f"{name} is not the source's"
    return None


def run(
    kinds: Mapping[str, Kind], seed: int, *, first: int, count: int, seconds: float
) -> dict[str, Tally]:
    """Run trials of each kind in turn, and print those that failed."""
    tallies = {name: Tally() for name in kinds}
    until = time.monotonic() + seconds
    with TemporaryDirectory(prefix="campaign-") as home:
        for number in range(first, first + count):
            for name, kind in kinds.items():
                if time.monotonic() > until:
                    return tallies
                folder = Path(home) / "trial"
                folder.mkdir()
                outcome, detail = kind(folder, Random(f"{seed} {name} {number}"))
                shutil.rmtree(folder)
                tallies[name].counts[outcome] += 1
                if outcome in _FAILURES:
                    tallies[name].failures[number] = detail
                    told = detail[-2000:].replace("\n", "\n    ")
                    print(f"{name}, seed {seed}, trial {number}: {outcome}: {told}", flush=True)
    return tallies


def table(tallies: Mapping[str, Tally]) -> str:
    """Return what became of the trials as a table in Markdown."""
    every = sum((own.counts for own in tallies.values()), Counter[str]())
    rows = [(name, own.counts) for name, own in tallies.items()] + [("all", every)]
    heads = f"| kind | trials | {' | '.join(OUTCOMES)} |"
    return "\n".join(
        (
            heads,
            "|---" * heads.count(" | ") + "|---|",
            *(
                f"| {name} | {sum(own.values())} | {' | '.join(str(own[o]) for o in OUTCOMES)} |"
                for name, own in rows
            ),
        )
    )


def main(told: str | None, kinds: Mapping[str, Kind], arguments: Sequence[str] | None) -> int:
    """Run the campaign that a command line asks for, and print its table; 1: a trial failed."""
    parser = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", help="how its name begins")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=50, help="trials of each kind")
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args(arguments)
    for begun in asked.kind or ():
        if not any(name.startswith(begun) for name in kinds):
            parser.error(f"no kind begins with '{begun}'; there are: {', '.join(kinds)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "NO_COLOR": "1"}
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="campaign-cache-") as cache:
        os.environ["COVMERGE_CACHE"] = cache
        wanted = tuple(asked.kind or [""])
        tallies = run(
            {name: kind for name, kind in kinds.items() if name.startswith(wanted)},
            asked.seed,
            first=asked.first,
            count=asked.count,
            seconds=60 * asked.minutes,
        )
    print(table(tallies))
    return 1 if any(own.failures for own in tallies.values()) else 0
