"""Hostile input: every reader of covmerge on inputs that were valid and are no longer.

    python -m tests.campaigns.hostile --minutes 10 --seed 0

An input is a valid one with one to four changes, drawn by reader, seed and number, so that it can be made
again: `--reader NAME --first NUMBER --count 1`. What each must keep is `promise.py`. Inputs are read in
processes that are forked off this one, some thousands each, so that one that dies is seen as well. What
fails is made smaller, by leaving out changes, and kept under `--keep` as the folder that it is. With
failures the exit code is 1. What is read and written lies in memory, where there is /dev/shm.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.campaigns.inputs import Content, Laid, hostile
from tests.campaigns.promise import Broken
from tests.campaigns.readers import IN, OUT, READERS, inputs_of
from tests.campaigns.sandbox import Outcome, Sandbox, Say, forked

MEMORY = Path("/dev/shm")
_EACH = 2000  # inputs of one process
_SECRET = "outside"

Drawn = tuple[int, int, list[int]]  # an input's number, which valid one it was, and its changes


class Campaign:
    """The valid inputs of some readers, and a folder to make them hostile in: the working directory."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._seed = seed
        self._home = Path.cwd()
        self._valid: dict[str, list[dict[str, Content]]] = {}
        for name in names:
            with TemporaryDirectory() as folder:
                os.chdir(folder)
                try:
                    self._valid[name] = list(inputs_of(READERS[name]))
                finally:
                    os.chdir(self._home)
        outside = self._home / _SECRET
        outside.mkdir()
        (outside / "secret").write_text("secret")
        for inputs in self._valid.values():
            for files in inputs:
                for path, content in files.items():
                    if isinstance(content, bytes):
                        (outside / Path(path).name).write_bytes(content)
        for name in (IN, "tmp", "cache", OUT):
            (self._home / name).mkdir()

    def valid(self, name: str) -> Sequence[Mapping[str, Content]]:
        """Return the valid inputs of a reader."""
        return self._valid[name]

    def check(self, name: str) -> None:
        """See that what is to be made hostile is valid: an input that is always refused shows nothing.

        They are read here first, so that what reading them imports is there in all processes to come.

        Raises:
            SystemExit: it is not.
        """
        reader = READERS[name]
        if not reader.forks:
            for files in self._valid[name]:
                laid = Laid(self._home / IN)
                laid.clear()
                laid.lay(files)
                reader.read(IN)
                shutil.rmtree(OUT)
                OUT.mkdir()
        outcome = Outcome()
        self._read(name, ((which, which, []) for which in range(len(self._valid[name]))), outcome)
        if outcome.counts["read"] < len(self._valid[name]) or outcome.failures:
            raise SystemExit(f"{name}: not all valid inputs were read: {outcome}")

    def run(self, name: str, numbers: range, until: float) -> Outcome:
        """Read inputs of a reader, and end early at a time (`time.monotonic`)."""
        outcome = Outcome()
        first = numbers.start
        while first < numbers.stop and time.monotonic() < until:
            last = self._batch(name, range(first, min(first + _EACH, numbers.stop)), until, outcome)
            if last < first:  # the time ended before one was begun
                break
            first = last + 1
        return outcome

    def changes(self, name: str, number: int) -> tuple[int, list[int]]:
        """Return which valid input an input was, and its changes."""
        random = Random(f"{self._seed} {name} {number}")
        which = random.randrange(len(self._valid[name]))
        count = random.choice((1, 1, 1, 2, 2, 3, 4))
        return which, [random.getrandbits(63) for _ in range(count)]

    def smallest(self, name: str, number: int, kind: str) -> tuple[int, list[int]]:
        """Return the changes of an input without those that it fails in the same way without."""
        which, changes = self.changes(name, number)
        for own in list(changes):
            fewer = [other for other in changes if other != own]
            outcome = Outcome()
            self._read(name, [(number, which, fewer)], outcome)
            if fewer and kind in outcome.failures:
                changes = fewer
        return which, changes

    def keep(self, name: str, number: int, failure: Broken, folder: Path) -> Path:
        """Write the smallest input that fails as a folder, and beside it how."""
        which, changes = self.smallest(name, number, failure.kind)
        place = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}-{self._seed}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        (place / IN).mkdir(parents=True)
        Laid(place / IN).lay(hostile(self._valid[name][which], changes, READERS[name].files))
        told = f"{name}, seed {self._seed}, input {number}, changes {changes}\n{failure.kind}\n\n"
        (place / "failure.txt").write_text(told + failure.detail, errors="backslashreplace")
        return place

    def _batch(self, name: str, numbers: range, until: float, outcome: Outcome) -> int:
        drawn = ((number, *self.changes(name, number)) for number in numbers)
        return self._read(name, drawn, outcome, until)

    def _read(
        self, name: str, inputs: Iterable[Drawn], outcome: Outcome, until: float = float("inf")
    ) -> int:
        """Have a process read inputs; return the number of the last one."""

        def work(say: Say) -> None:
            sandbox = Sandbox(READERS[name], self._home)
            for number, which, changes in inputs:
                if time.monotonic() > until:
                    break
                say({"begin": number})
                files = hostile(self._valid[name][which], changes, READERS[name].files)
                say({"number": number, **sandbox.read(files)})

        return forked(work, outcome)


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return what became of the inputs as a table in Markdown."""
    total = Outcome()
    for own in outcomes.values():
        total.add(own)
    heads = ["| reader | inputs | read | refused | failed | ms |", "|---|---|---|---|---|---|"]
    return "\n".join(
        (*heads, *(row(name, own) for name, own in outcomes.items()), row("all", total))
    )


def row(name: str, own: Outcome) -> str:
    """Return a line of the table."""
    refused = own.inputs - own.read - own.failed
    each = 1000 * own.seconds / max(1, own.inputs)
    return f"| {name} | {own.inputs} | {own.read} | {refused} | {own.failed} | {each:.1f} |"


def run(
    names: Sequence[str], seed: int, *, first: int, count: int, seconds: float, keep: Path | None
) -> dict[str, Outcome]:
    """Read inputs of readers for an equal time each, and print what failed."""
    outcomes: dict[str, Outcome] = {}
    before = Path.cwd()
    with TemporaryDirectory(prefix="hostile-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        os.chdir(folder)
        try:
            campaign = Campaign(names, seed)
            for name in names:
                campaign.check(name)
                until, before_it = time.monotonic() + seconds / len(names), _cpu()
                own = outcomes[name] = campaign.run(name, range(first, first + count), until)
                own.seconds = _cpu() - before_it
                print(row(name, own), flush=True)
                for kind, failures in own.failures.items():
                    number, failure = failures[0]
                    print(f"{name}: {kind}: {len(failures)} inputs, such as {number}", flush=True)
                    print(
                        "    " + failure.detail.strip()[-1500:].replace("\n", "\n    "), flush=True
                    )
                    if keep is not None:
                        print(
                            f"    kept in {campaign.keep(name, number, failure, keep)}", flush=True
                        )
        finally:
            os.chdir(before)
    return outcomes


def _cpu() -> float:
    """Seconds of all processes that have ended: those of this one are few."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def quieten() -> None:
    """Have the libraries stay off the network and the screen, on one core."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args(arguments)
    quieten()
    outcomes = run(
        asked.reader or list(READERS),
        asked.seed,
        first=asked.first,
        count=asked.count,
        seconds=60 * asked.minutes,
        keep=None if asked.keep is None else asked.keep.absolute(),
    )
    print(table(outcomes))
    return 1 if any(own.failures for own in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
