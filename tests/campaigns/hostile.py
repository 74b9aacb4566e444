"""Hostile input: every reader of covmerge on inputs that were valid and are no longer.

    python -m tests.campaigns.hostile --minutes 10 --seed 0

An input is a valid one with one to four changes, drawn by reader, seed and number, so that it can be made
again: `--reader NAME --first NUMBER --count 1`. What each must keep is `promise.py`. Inputs are read in
processes that are forked off this one, some thousands each, so that one that dies is seen as well. What
fails is made smaller, by leaving out changes, and kept under `--keep` as the folder that it is. With
failures the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.campaigns.inputs import Laid, hostile
from tests.campaigns.promise import Broken, Watch, broken, limit_memory
from tests.campaigns.readers import IN, OUT, READERS, inputs_of

_EACH = 2000  # inputs of one process
_SILENT = 30.0  # seconds after which a process is taken to hang
_ALLOWED = ("in", "tmp", "cache")
_SECRET = "outside"


@dataclass
class Outcome:
    """What became of the inputs of one reader."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        return sum(self.counts.values())


class Campaign:
    """The valid inputs of some readers, and a folder to make them hostile in: the working directory."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._seed = seed
        self._home = Path.cwd()
        self._valid: dict[str, list[dict[str, bytes]]] = {}
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
                    (outside / Path(path).name).write_bytes(content)
        for name in ("in", "tmp", "cache", "out"):
            (self._home / name).mkdir()

    def run(self, name: str, numbers: range, until: float) -> Outcome:
        """Read inputs of a reader, and end early at a time (`time.monotonic`)."""
        outcome, started = Outcome(), time.monotonic()
        first = numbers.start
        while first < numbers.stop and time.monotonic() < until:
            last = self._batch(name, range(first, min(first + _EACH, numbers.stop)), until, outcome)
            if last < first:  # the time ended before one was begun
                break
            first = last + 1
        outcome.seconds = time.monotonic() - started
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
            self._forked(name, [(number, which, fewer)], time.monotonic() + 60, outcome)
            if fewer and kind in outcome.failures:
                changes = fewer
        return which, changes

    def keep(self, name: str, number: int, failure: Broken, folder: Path) -> Path:
        """Write the smallest input that fails as a folder, and beside it how."""
        which, changes = self.smallest(name, number, failure.kind)
        place = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}-{self._seed}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "in").mkdir(parents=True)
        Laid(place / "in").lay(hostile(self._valid[name][which], changes, READERS[name].files))
        told = f"{name}, seed {self._seed}, input {number}, changes {changes}\n{failure.kind}\n\n"
        (place / "failure.txt").write_text(told + failure.detail, errors="backslashreplace")
        return place

    def _batch(self, name: str, numbers: range, until: float, outcome: Outcome) -> int:
        return self._forked(
            name, ((number, *self.changes(name, number)) for number in numbers), until, outcome
        )

    def _forked(
        self, name: str, inputs: Iterator[Any] | Sequence[Any], until: float, outcome: Outcome
    ) -> int:
        """Have a process read inputs; return the number of the last one."""
        ours, theirs = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            code, spoken = 1, os.dup(2)
            try:
                with os.fdopen(theirs, "w", buffering=1) as said:
                    self._work(name, inputs, until, said)
                code = 0
            except BaseException:
                os.write(spoken, traceback.format_exc().encode(errors="replace"))
            finally:
                os._exit(code)
        os.close(theirs)
        begun, last, death = None, -1, None
        with os.fdopen(ours, "rb", buffering=0) as heard:
            for line in _lines(heard):
                if line is None:
                    death = f"no answer for {_SILENT:.0f} s"
                    os.kill(pid, signal.SIGKILL)
                    break
                record = json.loads(line)
                if "begin" in record:
                    begun = last = record["begin"]
                    continue
                begun = None
                outcome.counts[record["outcome"]] += 1
                if record["kind"] is not None:
                    fault = Broken(record["kind"], record["detail"])
                    outcome.failures.setdefault(fault.kind, []).append((record["number"], fault))
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if begun is not None:
            fault = Broken(death or f"the process died ({code})", "")
            outcome.counts["died"] += 1
            outcome.failures.setdefault(fault.kind, []).append((begun, fault))
        elif code:
            raise SystemExit(f"a process of the campaign itself failed ({code})")
        return last

    def _work(self, name: str, inputs: Any, until: float, said: Any) -> None:
        reader = READERS[name]
        os.environ["TMPDIR"] = str(self._home / "tmp")
        os.environ["COVMERGE_CACHE"] = str(self._home / "cache")
        import tempfile

        tempfile.tempdir = None
        warnings.simplefilter("ignore")
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        laid = Laid(self._home / "in")
        laid.clear()
        watch = Watch(self._home, _ALLOWED)
        limit_memory()
        for number, which, changes in inputs:
            if time.monotonic() > until:
                break
            said.write(json.dumps({"begin": number}) + "\n")
            files = hostile(self._valid[name][which], changes, reader.files)
            laid.lay(files)
            names = {str(IN), "checkpoint", *(Path(path).name for path in files)}
            ended, fault = broken(
                lambda: reader.read(IN),
                watch,
                named=reader.named,
                writes=("out",) if reader.writes else (),
                names=names,
            )
            fault = fault or self._left(ended)
            if reader.writes or reader.read.__name__ in _CHANGE_THEIR_INPUT:
                laid.clear()
            kind, detail = (None, "") if fault is None else (fault.kind, fault.detail)
            record = {"number": number, "outcome": ended, "kind": kind, "detail": detail}
            said.write(json.dumps(record) + "\n")

    def _left(self, ended: str) -> Broken | None:
        """An output where there was an error, which nobody may find; and a clean slate."""
        left = sorted(path.name for path in OUT.iterdir())
        for path in OUT.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        wrong = [name for name in left if not name.startswith(".")]
        if ended not in ("read", "CheckFailed") and wrong:
            return Broken(f"left {wrong[0]} behind", ended)
        return None


_CHANGE_THEIR_INPUT = ("_read_journal",)


def _lines(heard: Any) -> Iterator[bytes | None]:
    """Lines of a pipe; None where none comes for long."""
    waiting = b""
    while True:
        ready, _, _ = select.select([heard], [], [], _SILENT)
        if not ready:
            yield None
            return
        chunk = heard.read(1 << 16)
        if not chunk:
            return
        *whole, waiting = (waiting + chunk).split(b"\n")
        yield from whole


def table(outcomes: dict[str, Outcome]) -> str:
    """Return what became of the inputs as a table in Markdown."""
    lines = ["| reader | inputs | read | refused | failed |", "|---|---|---|---|---|"]
    for name, own in outcomes.items():
        failed = sum(map(len, own.failures.values()))
        read = own.counts["read"]
        lines.append(
            f"| {name} | {own.inputs} | {read} | {own.inputs - read - failed} | {failed} |"
        )
    total = sum(own.inputs for own in outcomes.values())
    failed = sum(len(f) for own in outcomes.values() for f in own.failures.values())
    lines.append(f"| all | {total} | | | {failed} |")
    return "\n".join(lines)


def run(
    names: Sequence[str], seed: int, *, first: int, count: int, seconds: float, keep: Path | None
) -> dict[str, Outcome]:
    """Read inputs of readers for an equal time each, and print what failed."""
    outcomes: dict[str, Outcome] = {}
    before = Path.cwd()
    with TemporaryDirectory(prefix="hostile-") as folder:
        os.chdir(folder)
        try:
            campaign = Campaign(names, seed)
            for name in names:
                until = time.monotonic() + seconds / len(names)
                own = outcomes[name] = campaign.run(name, range(first, first + count), until)
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
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch

    torch.set_num_threads(1)
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
