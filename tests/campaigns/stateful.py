"""Merges, kills, resumes, damage, reports and pushes in any order, against a model of what is there.

    python -m tests.campaigns.stateful --minutes 10 --seed 0

hypothesis draws the order and makes a failing one short. What is known after each step is `_Known`: which
output lies there, whether it is as it was written, and of which merge and sources the unfinished work is.
Each command must do what follows from that, and leave the rest as it is; the sources are never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import covmerge
from covmerge.errors import CheckFailed, InputError
from tests.campaigns.disturbed import At, Child, kill_self
from tests.campaigns.scenes import Digests, digests
from tests.checkpoints.hub_server import WRITER, connect, serve
from tests.cli.runs import save_plain
from tests.interrupted import InterruptAfter

METHODS = ("average", "ties")
_FLAGS = st.sampled_from(([], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"]))
_LATE = ("report.html",)  # what a report adds to an output
Source = tuple[str, str]  # the method, and the state of the sources


@dataclass
class _Known:
    """What is known of the place of the output.

    Attributes:
        output: of which merge an output is there.
        damaged: whether it is not as it was written.
        stranger: whether a file lies in it that is not covmerge's.
        begun: of which merge there is unfinished work to go on with.
        aside: whether anything of such work lies there.
        sources: which of two states they are in.
        touched: how often they were changed: what was begun before is not gone on with.
    """

    output: Source | None = None
    damaged: bool = False
    stranger: bool = False
    begun: tuple[str, int] | None = None
    aside: bool = False
    sources: str = "first"
    touched: int = 0


class Machine(RuleBasedStateMachine):
    """One output, and all that is done to it."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.known = _Known()
        self._expected: dict[Source, Digests] = {}
        self.closing = ExitStack()
        self.home = Path(mkdtemp(prefix="stateful-"))
        self.closing.callback(shutil.rmtree, self.home)
        (self.home / "tmp").mkdir()
        self.inputs, self.place = self.home / "in", self.home / "disk"
        self.inputs.mkdir()
        self.place.mkdir()
        save_plain(self.inputs, layers=4)
        self.expert = self.inputs / "a.safetensors"
        self.contents = {
            "first": self.expert.read_bytes(),
            "second": (self.inputs / "b.safetensors").read_bytes(),
        }
        self.kept = digests(self.inputs)
        self.out = self.place / "out"
        self.partial = self.place / ".out.covmerge-partial"
        patch = self.closing.enter_context(pytest.MonkeyPatch.context())
        (self.home / "nothing").mkdir()
        self.hub = self.closing.enter_context(serve(self.home / "nothing"))
        connect(patch, self.hub, self.home / "cache", WRITER)
        patch.setattr(os, "fsync", lambda fd: None)
        self.counts["runs"] += 1

    def teardown(self) -> None:
        self.closing.close()

    # What is done.

    @rule(method=st.sampled_from(METHODS), flags=_FLAGS)
    def merge(self, method: str, flags: list[str]) -> None:
        """A merge that nothing happens to."""
        self._tell("merge")
        refusal = self._refusal(method, flags)
        try:
            self._merge(method, flags)
        except InputError as error:
            assert refusal is not None and refusal in str(error), (refusal, str(error))
        else:
            assert refusal is None, f"not refused: {refusal}"
            self._is_written(method)

    @rule(method=st.sampled_from(METHODS), flags=_FLAGS, items=st.integers(1, 5))
    def interrupt(self, method: str, flags: list[str], items: int) -> None:
        """Ctrl-C once some items are done."""
        self._tell("interrupt")
        refusal = self._refusal(method, flags)
        try:
            self._merge(method, flags, progress=InterruptAfter(items))
        except InputError as error:
            assert refusal is not None and refusal in str(error), (refusal, str(error))
        except KeyboardInterrupt:
            assert refusal is None
            self.known.begun, self.known.aside = (method, self.known.touched), True
        else:  # all items had been done before
            assert refusal is None
            self._is_written(method)

    @rule(method=st.sampled_from(METHODS), flags=_FLAGS, step=st.integers(1, 160))
    def kill(self, method: str, flags: list[str], step: int) -> None:
        """`kill -9` at a step."""
        self._tell("kill -9")
        refusal = self._refusal(method, flags)
        before, journal = self.known.output, self._journal()
        held = self._digests() if self.out.exists() else None
        named = [f"--expert={name}={self.inputs / name}.safetensors" for name in "ab"]
        given = ["merge", "--base", str(self.inputs / "base.safetensors"), *named]
        given += [f"--method={method}", str(self.out), *flags]
        ended = Child(self.home, given, at=At(step, kill_self)).wait()
        for path in self.home.glob("*-[0-9]*"):
            path.unlink()
        if ended.code == 0:
            assert refusal is None
            self._is_written(method)
            return
        if ended.code == 2:
            assert refusal is not None, ended.said
            self._look()
            return
        assert ended.code == -9, ended.said
        self.counts["killed"] += 1
        if refusal is not None:  # it was killed before it came to that
            self._look()
            return
        found = self._found()
        own = (method, self.known.sources)
        if found is None:  # the old one is away, or there was none
            assert before is None or (self.partial / "replaced").exists()
            self.known.output = before if (self.partial / "replaced").exists() else None
        elif found == own and (found != before or self._is_anew(own)):
            self._is_written(method)
        elif self.known.damaged and self._digests() != held:
            self._is_written(method)  # what was damaged is replaced, by what was not written before
        self._look()
        after = self._journal()
        if after is None:
            self.known.begun = None
        elif after != journal:  # else what was begun before is still there
            self.known.begun = (method, self.known.touched)

    @precondition(lambda self: self._is_begun())
    @rule()
    def change_sources(self) -> None:
        """An expert becomes another, or what it was before."""
        self._tell("change the sources")
        self.known.sources = "second" if self.known.sources == "first" else "first"
        self.known.touched += 1
        self.expert.write_bytes(self.contents[self.known.sources])
        self.kept = digests(self.inputs)

    @precondition(lambda self: self._is_there() and not self.known.damaged)
    @rule(place=st.floats(0, 1, exclude_max=True), what=st.sampled_from(("bit", "cut")))
    def damage(self, place: float, what: str) -> None:
        """A bit of the weights, or their end."""
        self._tell("damage")
        path = self.out / "model.safetensors"
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        if what == "bit":
            content[at] ^= 1
        else:
            del content[at:]
        path.write_bytes(content)
        self.known.damaged = True

    @precondition(lambda self: self._is_there())
    @rule()
    def lay_in(self) -> None:
        """A file of somebody else in the output, or it is taken away again."""
        self._tell("lay in a file")
        path = self.out / "thesis.tex"
        if self.known.stranger:
            path.unlink()
        else:
            path.write_text("precious")
        self.known.stranger = not self.known.stranger

    @precondition(lambda self: self._is_begun())
    @rule()
    def verify(self) -> None:
        """The output is what its manifest says, unless it was damaged."""
        self._tell("verify")
        if not self._is_there():
            with pytest.raises(InputError):
                covmerge.verify(self.out)
            return
        found = covmerge.verify(self.out)
        assert found.ok != self.known.damaged, str(found.checks)

    @precondition(lambda self: self._is_begun())
    @rule()
    def report(self) -> None:
        """A page on the output, which is then part of it."""
        self._tell("report")
        if not self._is_there():
            with pytest.raises(InputError):
                covmerge.report(self.out)
            return
        if self.known.damaged:  # it may be read all the same, or be refused in words
            try:
                covmerge.report(self.out)
            except InputError:
                return
        else:
            covmerge.report(self.out)

    @precondition(lambda self: self._is_begun())
    @rule()
    def push(self) -> None:
        """What is pushed is what lies there, and nothing unfinished or damaged is."""
        self._tell("push")
        before = len(self.hub.commits)
        try:
            covmerge.push(self.out, "org/name")
        except (InputError, CheckFailed) as error:
            assert not self._is_fine(), str(error)
            assert len(self.hub.commits) == before
            return
        assert self._is_fine()
        commit = self.hub.commits[-1]
        assert commit.files == {name: (self.out / name).read_bytes() for name in digests(self.out)}

    # What holds at all times.

    @invariant()
    def sources_are_intact(self) -> None:
        assert digests(self.inputs) == self.kept

    @invariant()
    def what_is_there_is_known(self) -> None:
        beside = {path.name for path in self.place.iterdir()}
        assert beside <= {self.out.name, self.partial.name}, beside
        if self.known.aside is False:
            assert not self.partial.exists(), sorted(self.partial.rglob("*"))
        if self.out.exists() and not self.known.damaged:
            assert self._found() == self.known.output

    # What is known.

    def _tell(self, what: str) -> None:
        self.counts[what] += 1

    def _is_begun(self) -> bool:
        return self.known.output is not None or self.known.aside

    def _is_there(self) -> bool:
        return self.known.output is not None and self.out.exists()

    def _is_fine(self) -> bool:
        under_way = (self.partial / "output").exists()
        return self._is_there() and not self.known.damaged and not under_way

    def _refusal(self, method: str, flags: list[str]) -> str | None:
        """What a merge is refused with; None: it is made."""
        known = self.known
        overwrite, resume = "--overwrite" in flags, "--resume" in flags
        if known.output is not None and not overwrite:
            # One that is away as its replacement was killed is put back first, and is there then.
            return "exists"
        if known.output is not None and known.stranger:
            return "did not write"
        if known.begun is not None:
            if not (overwrite or resume):
                return "unfinished"
            if resume and known.begun != (method, known.touched):
                return "another merge"
        return None

    def _merge(self, method: str, flags: list[str], **how: Any) -> None:
        base = self.inputs / "base.safetensors"
        experts = {name: self.inputs / f"{name}.safetensors" for name in "ab"}
        how |= {flag.removeprefix("--"): True for flag in flags}
        try:
            covmerge.merge(base, experts, method, self.out, threads=1, **how)
        finally:
            self._look()

    def _is_written(self, method: str) -> None:
        own = (method, self.known.sources)
        known = self._expected.setdefault(own, self._digests())
        assert self._digests() == known, "another output than the last time"
        self.known.output, self.known.damaged, self.known.stranger = own, False, False
        self.known.begun = None
        self._look()

    def _look(self) -> None:
        self.known.aside = self.partial.exists()
        if self.known.output is not None and not self.out.exists():
            assert (self.partial / "replaced").exists(), "the output is gone"

    def _journal(self) -> str | None:
        """Of which merge the unfinished work is, as it says itself; None: there is none to go on with."""
        path = self.partial / "journal.jsonl"
        if not (path.exists() and (self.partial / "output").exists()):
            return None
        return path.read_text().partition("\n")[0]

    def _digests(self) -> Digests:
        return {n: own for n, own in digests(self.out).items() if n not in (*_LATE, "thesis.tex")}

    def _found(self) -> Source | None:
        """Which output lies there; one that none of them is fails."""
        if not self.out.exists():
            return None
        found = self._digests()
        same = [own for own, known in self._expected.items() if known == found]
        if not same and self.known.damaged:
            return self.known.output
        if not same:  # written for the first time, by a merge that was killed after it
            assert covmerge.verify(self.out).ok, "half an output"
            method = next(m for m in METHODS if f'"method": "{m}"' in self._manifest())
            return method, self.known.sources
        return same[0]

    def _is_anew(self, own: Source) -> bool:
        """Whether a damaged output was replaced by the same before the merge was killed."""
        return self.known.damaged and self._digests() == self._expected.get(own)

    def _manifest(self) -> str:
        return (self.out / "covmerge.json").read_text()


def run(examples: int, steps: int, number: int | None = None) -> None:
    """Run the machine; without a number it is the same every time."""
    own = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = Machine
    if number is not None:
        machine = seed(number)(Machine)
    run_state_machine_as_test(machine, settings=own)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how often each step was taken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, help="runs of the short one, the same every time")
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_COLOR": "1"}
    import torch

    torch.set_num_threads(1)
    if asked.examples is not None:
        run(asked.examples, asked.steps)
    else:
        until, number = time.monotonic() + 60 * asked.minutes, asked.seed
        while time.monotonic() < until:
            run(20, asked.steps, number)
            number += 1
    print("| step | times |\n|---|---|")
    for name, count in Machine.counts.most_common():
        print(f"| {name} | {count} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
