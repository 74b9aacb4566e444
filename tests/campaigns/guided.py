"""Hostile input that is guided by coverage: what reaches new branches of covmerge is changed further.

    python -m tests.campaigns.guided --minutes 10 --reader recipe

Takes atheris (`pip install 'covmerge[campaigns]'`), whose fuzzer is LLVM's libFuzzer; only covmerge's own
modules are instrumented. An input is a folder, as in `hostile.py`, and so are the promise and the processes
that keep it. It begins with the valid ones, and is changed by what its formats say or byte by byte. What
fails is made smaller, by valid files in the place of others and by leaving bytes out, and kept under
`--keep`; `--again FOLDER` reads what was kept once more. With failures the exit code is 1. Where libFuzzer
ends on an input that does no harm when it is read alone it is begun again, and counted as ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import atheris

# atheris names every module that it instruments.
with redirect_stderr(StringIO()), atheris.instrument_imports(include=["covmerge"]):
    from tests.campaigns.hostile import MEMORY, Campaign, quieten
    from tests.campaigns.inputs import Content, Laid, Link, Odd, Sparse, hostile
    from tests.campaigns.readers import IN, READERS
    from tests.campaigns.sandbox import Outcome, Sandbox, Say, forked

if TYPE_CHECKING:
    from tests.campaigns.promise import Broken

_LONGEST = 1 << 17  # bytes of an input, or twice those of the longest valid one
_SEEDS = 12  # changed inputs to begin with, beside each valid one
_TRIALS = 150  # smaller inputs that are tried
_CHANGED = 0.6  # of inputs by their formats, the others by libFuzzer's bytes
_NEVER = 10**6  # seconds; atheris takes 0, which is never to libFuzzer, for the next whole second
_SAID = re.compile(rb"cov: (\d+) ft: \d+ corp: (\d+)/")
_KINDS = {own.__name__: own for own in (Link, Odd, Sparse)}

Files = Mapping[str, Content]


class Guided:
    """The inputs of one reader, and what was reached with them."""

    def __init__(self, campaign: Campaign, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._reader = READERS[name]
        self._valid = campaign.valid(name)
        self._home = Path.cwd()
        self._corpus = self._home / "corpus"
        shutil.rmtree(self._corpus, ignore_errors=True)
        self._corpus.mkdir()
        self._current = self._home / "current"
        self._longest = max(_LONGEST, *(2 * len(pack(files)) for files in self._valid))
        self.outcome = Outcome()
        self.inputs: dict[str, Files] = {}
        self.branches: list[int] = []
        self.ended = 0  # processes of the fuzzer, on inputs that alone end none
        self.kept = 0

    def run(self, seconds: float) -> None:
        """Let the fuzzer make inputs for a time; it is begun again where it ends with its process."""
        until = time.monotonic() + seconds
        for number, files in enumerate(self._first()):
            if len(data := pack(files)) <= self._longest:
                (self._corpus / str(number)).write_bytes(data)
        for attempt in range(1000):
            left = until - time.monotonic()
            if left < 1:
                break
            before = set(self.outcome.failures)
            forked(lambda say, left=left, own=attempt: self._fuzz(say, left, own), self.outcome)
            for kind in set(self.outcome.failures) - before - set(self.inputs):
                self._take(kind)
                if "died" in kind:
                    said = (self._home / "log").read_text(errors="replace")
                    print(f"{self._name}: {kind}:\n{said[-3000:]}", flush=True)
                    if not self.read(self.inputs[kind]).failures:
                        del self.outcome.failures[kind], self.inputs[kind]
                        self.ended += 1
            said = _SAID.findall((self._home / "log").read_bytes())
            self.branches += [int(branches) for branches, _ in said]
            self.kept = int(said[-1][1]) if said else self.kept

    def smallest(self, kind: str) -> Files:
        """Return an input that fails in one way with as little in it as a number of trials finds."""
        files, trials = dict(self.inputs[kind]), 0
        for fewer in self._smaller(lambda: files):  # noqa: B023 - of now
            if (trials := trials + 1) > _TRIALS:
                break
            if kind in self.read(fewer).failures:
                files = dict(fewer)
        return files

    def read(self, files: Files) -> Outcome:
        """Read one input in a process of its own."""
        outcome = Outcome()

        def work(say: Say) -> None:
            sandbox = Sandbox(self._reader, self._home)
            say({"begin": 0})
            say({"number": 0, **sandbox.read(files)})

        forked(work, outcome)
        return outcome

    def _first(self) -> Iterator[Files]:
        random = Random(f"{self._seed} {self._name}")
        for files in self._valid:
            yield files
            for _ in range(_SEEDS):
                yield hostile(files, [random.getrandbits(63)], self._reader.files)

    def _fuzz(self, say: Say, seconds: float, attempt: int) -> None:
        sandbox = Sandbox(self._reader, self._home)
        log = os.open(self._home / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)
        kinds: set[str] = set()
        number, until = 0, time.monotonic() + seconds

        def one(data: bytes) -> None:
            nonlocal number
            if time.monotonic() > until:  # libFuzzer's own end has an exit code of its own
                os._exit(0)
            files = unpack(data)
            if files is None:
                return
            number += 1
            self._current.write_bytes(data)
            say({"begin": number})
            record = sandbox.read(files)
            if record["kind"] is not None and record["kind"] not in kinds:
                kinds.add(record["kind"])
                (self._home / f"failed-{_slug(record['kind'])}").write_bytes(data)
            say({"number": number, **record})

        def changed(data: bytes, most: int, seed: int) -> bytes:
            files = unpack(data) or self._valid[0]
            made = pack(self._changed(files, Random(seed), most))
            return made if len(made) <= most else data

        options = {
            **{"seed": self._seed * 1000 + attempt + 1, "print_pcs": 0},
            **{"max_len": self._longest, "len_control": 0, "timeout": _NEVER, "rss_limit_mb": 0},
            **{"malloc_limit_mb": 0, "artifact_prefix": f"{self._home}/", "handle_segv": 0},
        }
        given = [f"-{key}={value}" for key, value in options.items()]
        atheris.Setup(["guided", *given, str(self._corpus)], one, custom_mutator=changed)
        atheris.Fuzz()

    def _changed(self, files: Files, random: Random, most: int) -> Files:
        open_to = [
            name
            for name, own in files.items()
            if isinstance(own, bytes) and any(fnmatchcase(name, p) for p in self._reader.files)
        ]
        if not open_to or random.random() < _CHANGED:
            return hostile(files, [random.getrandbits(63)], self._reader.files)
        name = random.choice(sorted(open_to))
        own = files[name]
        assert isinstance(own, bytes)
        return {**files, name: atheris.Mutate(own, max(len(own), min(most, 2 * len(own) + 64)))}

    def _take(self, kind: str) -> None:
        """Keep the input of a new failure: what was told of, or what the process died of."""
        file = self._home / f"failed-{_slug(kind)}"
        files = unpack((file if file.exists() else self._current).read_bytes())
        assert files is not None, "it was unpacked before"
        self.inputs[kind] = files

    def _smaller(self, now: Callable[[], dict[str, Content]]) -> Iterator[Files]:
        """Smaller inputs than the smallest so far: valid files, no files, fewer bytes."""
        for name in sorted(now()):
            yield {key: own for key, own in now().items() if key != name}
            for valid in self._valid:
                if name in valid and now().get(name) != valid[name]:
                    yield {**now(), name: valid[name]}
        for name, own in sorted(now().items()):
            if not isinstance(own, bytes) or any(own == valid.get(name) for valid in self._valid):
                continue
            step = len(own) // 2
            while step:
                at = 0
                while isinstance(left := now()[name], bytes) and at < len(left):
                    yield {**now(), name: left[:at] + left[at + step :]}
                    at += step if now()[name] == left else 0
                step //= 2


def pack(files: Files) -> bytes:
    """Return a folder as bytes: a line of JSON, and what its files hold one after the other."""
    told: list[Any] = []
    for name, own in files.items():
        if isinstance(own, bytes):
            told.append([name, len(own)])
        else:
            about = asdict(own)
            if isinstance(own, Sparse):
                about["start"] = own.start.hex()
                about["islands"] = [[at, values.hex()] for at, values in own.islands]
            told.append([name, type(own).__name__, about])
    line = json.dumps(told).encode()
    return line + b"\n" + b"".join(own for own in files.values() if isinstance(own, bytes))


def unpack(data: bytes) -> dict[str, Content] | None:
    """Return the folder that `pack` was given; None: it was not."""
    line, _, rest = data.partition(b"\n")
    files: dict[str, Content] = {}
    try:
        for name, *kind in json.loads(line):
            if isinstance(kind[0], int):
                files[name], rest = rest[: kind[0]], rest[kind[0] :]
                continue
            about = dict(kind[1])
            if kind[0] == "Sparse":
                about["start"] = bytes.fromhex(about["start"])
                about["islands"] = tuple((at, bytes.fromhex(v)) for at, v in about["islands"])
            files[name] = _KINDS[kind[0]](**about)
    except (ValueError, TypeError, LookupError):
        return None
    return files


def stored(folder: Path) -> dict[str, Content]:
    """Return the input that was kept as a folder."""
    files: dict[str, Content] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            files[name] = Link(str(path.readlink()))
        elif path.is_fifo():
            files[name] = Odd("pipe")
        elif path.is_file() and path.stat().st_size > 1 << 22:
            with path.open("rb") as file:
                files[name] = Sparse(file.read(1 << 20), path.stat().st_size)
        elif path.is_file():
            files[name] = path.read_bytes()
        elif not any(path.iterdir()):
            files[name] = Odd("folder")
    return files


def keep(guided: Guided, name: str, kind: str, fault: Broken, folder: Path) -> Path:
    """Write the smallest input that fails as a folder, and beside it how."""
    place = folder / f"{_slug(name)}-{_slug(kind)}"
    shutil.rmtree(place, ignore_errors=True)
    (place / IN).mkdir(parents=True)
    Laid(place / IN).lay(guided.smallest(kind))
    told = f"{name}: {kind}\n\n{fault.detail}"
    (place / "failure.txt").write_text(told, errors="backslashreplace")
    return place


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-")[:80]


def run(
    names: Sequence[str], seed: int, *, seconds: float, kept: Path | None, again: Path | None
) -> int:
    """Read inputs of readers for an equal time each; print what failed, and a table."""
    lines = ["| reader | inputs | branches at first | in the end | inputs kept | failed | ended |"]
    lines.append("|---|---|---|---|---|---|---|")
    total = 0
    before = Path.cwd()
    with TemporaryDirectory(prefix="guided-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        os.chdir(folder)
        try:
            campaign = Campaign(names, seed)
            for name in names:
                campaign.check(name)
                guided = Guided(campaign, name, seed)
                if again is not None:
                    print(guided.read(stored(again)))
                    continue
                guided.run(seconds / len(names))
                own = guided.outcome
                for kind, failures in own.failures.items():
                    print(f"{name}: {kind}: {len(failures)} inputs", flush=True)
                    detail = failures[0][1].detail.strip()[-1500:]
                    print("    " + detail.replace("\n", "\n    "), flush=True)
                    if kept is not None and kind in guided.inputs:
                        place = keep(guided, name, kind, failures[0][1], kept)
                        print(f"    kept in {place}", flush=True)
                reached = guided.branches or [0]
                lines.append(
                    f"| {name} | {own.inputs} | {reached[0]} | {max(reached)} | {guided.kept} "
                    f"| {own.failed} | {guided.ended} |"
                )
                print(lines[-1], flush=True)
                total += own.failed
        finally:
            os.chdir(before)
    print("\n".join(lines))
    return 1 if total else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--again", type=Path, help="the `given` of what was kept of one --reader")
    asked = parser.parse_args(arguments)
    quieten()
    return run(
        asked.reader or list(READERS),
        asked.seed,
        seconds=60 * asked.minutes,
        kept=None if asked.keep is None else asked.keep.absolute(),
        again=None if asked.again is None else asked.again.absolute(),
    )


if __name__ == "__main__":
    with atheris.instrument_imports(include=["covmerge"]):  # also what is imported on the way
        sys.exit(main())
