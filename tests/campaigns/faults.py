"""Faults: merges that are killed, starved, robbed and shut out, in every form and by every executor.

    python -m tests.campaigns.faults --minutes 10 --seed 0

A trial is one merge that one thing happens to, drawn by fault, seed and number, so that it can be made
again: `--fault NAME --first NUMBER --trials 1`. After each, the sources are what they were; what lies at
the output is a whole one or none, and no work that is under way can be taken for one; an error is one in
words; and the merge that is resumed, or begun again where it says that it cannot be, writes the bytes of
an undisturbed one, and leaves nothing else. With failures the exit code is 1.

The output lies on a small file system in memory, mounted where only the campaign sees it, which needs root.
Without it the trials of a full disk are left out, and said to be.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from covmerge.files.stores import link, servers
from covmerge.run.verification import verify
from tests.campaigns.buckets import HELD, HELD_DONE, PASSING, REFUSED, Bucket, StoredScene
from tests.campaigns.disturbed import (
    At,
    Child,
    Disk,
    Ended,
    Nodes,
    kill_self,
    limit_memory,
    server_children,
    start_server,
)
from tests.campaigns.failing_disk import FailingDisk
from tests.campaigns.outcomes import difference
from tests.campaigns.scenes import FORMS, Digests, Scene, digests

EXECUTORS = {"threads": 6, "processes": 3, "ranks": 2}  # and how often, as some take longer
_RAY = "ray"  # where it is asked for, as it takes far longer
_WORLD = 2
_PATIENCE = 1.0  # of ranks
_ENOUGH = ("--max-memory", "8GB")
_PROMPT = 5.0  # seconds within which who is asked to end does


class BrokenError(AssertionError):
    """A promise that was not kept."""


@dataclass
class Outcome:
    """What became of the trials of one fault with one executor."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        return sum(self.counts.values())


# By fault and executor.
Outcomes = dict[str, dict[str, Outcome]]


@dataclass
class Set:
    """A scene and who merges it, with what an undisturbed merge takes.

    Attributes:
        scene: the sources, and where the output goes.
        executor: threads, processes or ranks.
        seconds: from fork to end.
        steps: files' steps of the process that leads.
        writes: how many of them are writes.
        used: bytes of the output.
        requests: that it makes of a bucket.
    """

    scene: Scene
    executor: str
    home: Path
    disk: Disk
    failing: FailingDisk
    nodes: Nodes | None = None
    seconds: float = 0.0
    steps: int = 0
    writes: int = 0
    used: int = 0
    requests: int = 0

    def start(self, *more: str, executor: str | None = None, **how: Any) -> list[Child]:
        """Start the merge: one process, or one for each rank, the first of which is disturbed."""
        executor = executor or self.executor
        arguments = self.scene.arguments(*more)
        if executor == "processes":
            # What the machine has free meanwhile is no matter.
            arguments += ["--workers", "2", *([] if "--max-memory" in more else _ENOUGH)]
            start_server()
        if executor == _RAY:
            assert self.nodes is not None
            arguments += ["--executor", "ray", "--address", self.nodes.address]
        if executor != "ranks":
            how["environment"] = {**self.scene.environment, **how.pop("environment", {})}
            return [Child(self.home, arguments, **how)]
        arguments += ["--executor", "ranks", "--patience", str(_PATIENCE)]
        number = {"WORLD_SIZE": str(_WORLD)}
        return [
            Child(
                self.home,
                arguments,
                environment={**number, "RANK": str(rank)},
                **(how if rank == 0 else {"humble": how.get("humble", False)}),
            )
            for rank in range(_WORLD)
        ]

    def run(self, *more: str, **how: Any) -> Ended:
        """Merge to the end; of ranks, how the first ended that did not end well."""
        ended = [child.wait() for child in self.start(*more, **how)]
        self.scene.look()
        return next((one for one in ended if one.code), ended[0])

    def measure(self) -> None:
        """Merge undisturbed, twice, and again with another expert where nobody did before."""
        for _ in range(2):
            self.scene.clear()
            children = self.start(counted=True)
            for child in children:
                ended = child.wait()
                if ended.code:
                    raise SystemExit(f"{self.scene.name}: {ended.said}")
            self.seconds = children[0].seconds
            self.steps, self.writes = children[0].steps()
            if isinstance(self.scene, StoredScene):
                self.requests = self.scene.bucket.requests
            self.scene.look()
            found = digests(self.scene.out)
            if found != (self.scene.expected or found):
                raise SystemExit(f"{self.scene.name}: two undisturbed merges differ")
            self.scene.expected = found
            if self.scene.form.mean and (wrong := difference(self.scene.out, self.scene.mean())):
                raise SystemExit(f"{self.scene.name}: {wrong}")
        self.used = sum(path.stat().st_size for path in self.scene.out.rglob("*"))
        if not self.scene.changed:
            self.scene.expert.write_bytes(self.scene.variant)
            self.scene.clear()
            ended = self.run(executor="threads")
            if ended.code:
                raise SystemExit(f"{self.scene.name}, changed: {ended.said}")
            self.scene.changed = digests(self.scene.out)
            self.scene.restore()
        self.scene.clear()

    def finished(self, *also: Digests) -> bool:
        """Whether an output is there, which then must be a whole one.

        Args:
            also: other outputs that may be there.

        Raises:
            BrokenError: what is there is something else, or the work under way could be taken for one.
        """
        scene = self.scene
        if strange := scene.strange():
            raise BrokenError(strange)
        under_way = scene.partial / "output"
        if (under_way / "covmerge.json").exists():
            good = [_without_card(known) for known in (scene.expected, scene.changed)]
            if _without_card(digests(under_way)) not in good and _verified(scene, under_way):
                raise BrokenError("unfinished work passes for an output")
        if not scene.out.exists():
            return False
        if digests(scene.out) not in (scene.expected, *also):
            raise BrokenError(f"the output is wrong: {_differences(scene)}")
        if not _verified(scene, scene.out):
            raise BrokenError("the output does not verify")
        return True

    def again(self, random: Random, *also: Digests, may_refuse: bool = False, **how: Any) -> str:
        """Go on after a fault, and see that the output is that of an undisturbed merge.

        Args:
            random: draws who goes on.
            also: outputs that may be there beside that of the merge.
            may_refuse: whether it may be said that the work cannot be gone on with.
            how: of the process.

        Returns:
            How it went on.

        Raises:
            BrokenError: it did not.
        """
        outcome = "was finished"
        executor = random.choice(("threads", self.executor))
        if not self.finished(*also) or also:
            begun = (self.scene.partial / "journal.jsonl").exists()
            ended = self.run(
                "--resume", *(["--overwrite"] if also else []), executor=executor, **how
            )
            outcome = "resumed" if begun and "nothing to resume" not in ended.said else "begun anew"
            if may_refuse and begun and ended.named:
                if "overwrite" not in ended.said:
                    raise BrokenError(f"the next step is not said: {ended.said}")
                outcome = "refused"
                ended = self.run("--overwrite", executor=executor, **how)
            if ended.code:
                raise BrokenError(f"not gone on with: {ended.code}\n{ended.said}")
        elif self.scene.left():  # it was published, and killed as it cleaned up
            ended = self.run("--overwrite", executor=executor, **how)
            if ended.code:
                raise BrokenError(f"not replaced: {ended.code}\n{ended.said}")
        self.whole()
        return outcome

    def whole(self) -> None:
        """See that the output is that of an undisturbed merge, and nothing else is there."""
        if not self.finished():
            raise BrokenError("no output")
        if self.scene.left():
            raise BrokenError("work is left beside the output")

    def workers(self, children: Sequence[Child]) -> list[int]:
        """The processes that do the work of a merge that has begun."""
        if self.executor == _RAY:
            assert self.nodes is not None
            return self.nodes.workers()
        if self.executor == "processes":
            return server_children()
        return [child.pid for child in children if not _ends(child, 0.0)]

    def had_ended(self, children: Sequence[Child]) -> str:
        """What came too late came to a merge that takes less time by now."""
        self.seconds = children[0].seconds
        self.whole()
        return "had ended"

    def over(self, *children: Child) -> list[Ended]:
        """Wait for processes and the workers that they had."""
        ended = [child.wait() for child in children]
        until = time.monotonic() + 20
        while self.executor == "processes" and server_children():
            if time.monotonic() > until:
                raise BrokenError(f"workers are left: {server_children()}")
            time.sleep(0.01)
        self.scene.look()
        return ended

    def refused(self, ended: Ended, *, names: Sequence[str] = ()) -> None:
        """See that an error was one in words, and that nothing looks finished after it."""
        if not ended.named:
            raise BrokenError(f"ended by {ended.code}:\n{ended.said}")
        if names and not any(name in ended.said for name in names):
            raise BrokenError(f"names none of {names}:\n{ended.said}")
        if self.finished():
            raise BrokenError(f"there is an output after an error:\n{ended.said}")


def _verified(scene: Scene, folder: Path) -> bool:
    """Whether an output verifies: each of its models."""
    return all(verify(folder / name).ok for name in scene.form.models)


def _without_card(known: Digests) -> Digests:
    """The files of an output but README.md, which people edit: `verify` notes that, and no more."""
    return {name: own for name, own in known.items() if name != "README.md"}


def _differences(scene: Scene) -> list[str]:
    found, wanted = digests(scene.out), scene.expected
    return sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name))


# Faults, each a function of a set and random numbers that returns the outcome.


def kill_by_clock(own: Set, random: Random) -> str:
    """`kill -9` at an instant; of ranks, one or all of them."""
    return _killed(own, random, random.uniform(0, 1.05 * own.seconds), None)


def kill_at_step(own: Set, random: Random) -> str:
    """`kill -9` between two steps."""
    return _killed(own, random, None, At(random.randint(1, own.steps), kill_self))


def kill_in_write(own: Set, random: Random) -> str:
    """`kill -9` with half of a write done."""
    return _killed(own, random, None, At(random.randint(1, own.writes), kill_self, torn=True))


def kill_twice(own: Set, random: Random) -> str:
    """`kill -9`, and again while it is resumed."""
    own.over(*own.start(at=At(random.randint(1, own.steps), kill_self)))
    if own.finished():
        return own.again(random)
    own.over(*own.start("--resume", at=At(random.randint(1, own.steps), kill_self)))
    return own.again(random)


def kill_replacing(own: Set, random: Random) -> str:
    """`kill -9` while an output of other weights is replaced: the old one, the new one or none is there."""
    own.scene.expert.write_bytes(own.scene.variant)
    _good(own.run(executor="threads"))
    own.scene.restore()
    # Where it is replaced is near the end.
    step = round(own.steps * random.choice((random.random(), 1 - 0.1 * random.random())))
    own.over(*own.start("--overwrite", at=At(step, kill_self)))
    return own.again(random, own.scene.changed)


def kill_worker(own: Set, random: Random) -> str:
    """`kill -9` of one that does the work, a process, a rank or one of Ray's: another does its work."""
    children = own.start()
    time.sleep(random.uniform(0, own.seconds))
    there = own.workers(children)
    victim = random.choice(there) if there else None
    if victim is not None:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    ended = own.over(*children)
    others = [one for child, one in zip(children, ended, strict=True) if child.pid != victim]
    return _went_on(own, random, others, "went on" if there else "nobody was at work")


def lose_node(own: Set, random: Random) -> str:
    """A node of Ray's is lost, with the tasks that it has: the other one does them."""
    assert own.nodes is not None
    (child,) = own.start()
    time.sleep(random.uniform(0, own.seconds))
    had_ended = _ends(child, 0.0)
    try:
        own.nodes.lose()
        ended = own.over(child)
    finally:
        own.nodes.replace()
    return _went_on(own, random, ended, "had ended" if had_ended else "went on")


def _went_on(own: Set, random: Random, ended: Sequence[Ended], well: str) -> str:
    """See that those that were left have made the output, or said in words why not."""
    if all(one.code == 0 for one in ended):
        if own.executor == "ranks" and own.finished():
            own.again(random)  # one that led may have been killed as it cleaned up
        own.whole()
        return well
    for one in ended:
        if one.code:
            own.refused(one)
    own.again(random)
    return "refused"


def _killed(own: Set, random: Random, seconds: float | None, at: At | None) -> str:
    children = own.start(at=at)
    victims = children if random.random() < 0.5 else [random.choice(children)]
    if seconds is not None:
        for victim in victims:
            victim.kill_after(seconds)
    ended = own.over(*children)
    if all(one.code == 0 for one in ended):
        return own.had_ended(children)
    if any(one.code == 0 for one in ended) and own.finished():
        own.again(random)
        return "went on"
    for one in ended:
        if one.code not in (0, -signal.SIGKILL) and not one.named:
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    return own.again(random)


def _interrupted(number: int, code: int, own: Set, random: Random) -> str:
    """A signal that asks for an end, at an instant: of a merge, or of all its ranks."""
    children = own.start()
    for child in children:
        child.kill_after(random.uniform(0.005, 1.05 * own.seconds), number)
    ended = own.over(*children)
    if all(one.code == 0 for one in ended):
        return own.had_ended(children)
    for one in ended:
        if one.code not in (0, code) and not one.named:
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    return own.again(random)


def full_from_start(own: Set, random: Random) -> str:
    """A disk that is too small."""
    own.disk.resize(own.disk.used() + random.randrange(0, own.used + 8192))
    return _starved(own, random, own.start(before=_no_reserving(random)))


def fills_up(own: Set, random: Random) -> str:
    """A disk that others fill meanwhile."""
    at = At(random.randint(1, own.steps), own.disk.fill)
    return _starved(own, random, own.start(at=at, before=_no_reserving(random)))


def limited_files(own: Set, random: Random) -> str:
    """A limit on the size of files."""
    most = random.randrange(0, max(p.stat().st_size for p in own.scene.inputs.rglob("*")))

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does for itself at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return _starved(own, random, own.start(before=limit))


def _starved(own: Set, random: Random, children: Sequence[Child]) -> str:
    ended = own.over(*children)
    own.disk.widen()
    bad = [one for one in ended if one.code]
    if not bad:
        own.whole()
        return "had ended"
    for one in bad:
        own.refused(one)
    own.again(random)
    return "refused"


def _no_reserving(random: Random) -> Callable[[], None]:
    """Now and then a file system that cannot reserve space, so that a write is what fails."""
    cannot = random.random() < 0.5

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def before() -> None:
        if cannot:
            os.posix_fallocate = refuse

    return before


def source_changes(own: Set, random: Random) -> str:
    """A source that is changed, cut, made longer, exchanged or removed at a step."""
    at = At(random.randint(1, own.steps), partial(_change, own.scene, random.random(), random))
    ended = own.over(*own.start(at=at))
    scene = own.scene
    if all(one.code == 0 for one in ended):
        if _is_of_changed_config(scene):
            scene.restore()
            return "was read as changed"
        own.finished(scene.changed)
        same = digests(scene.out) == scene.expected
        scene.restore()
        return "had been read" if same else "was read as changed"
    for one in ended:
        if one.code:
            own.refused(one)
    scene.restore()
    own.again(random, may_refuse=True)
    return "refused"


def source_changes_before_resume(own: Set, random: Random) -> str:
    """A source that is changed after a kill: what was begun over the old one is not gone on with."""
    own.over(*own.start(at=At(random.randint(1, own.steps), kill_self)))
    if own.finished():
        return own.again(random)
    scene = own.scene
    begun = (scene.partial / "journal.jsonl").exists() and (scene.partial / "output").exists()
    begun = begun and scene.form.resumes
    scene.expert.write_bytes(scene.variant)
    ended = own.run("--resume", executor="threads")
    if begun:
        own.refused(ended, names=("changed",))
        scene.restore()
        own.again(random, may_refuse=True)
        return "refused"
    _good(ended)
    if digests(scene.out) != scene.changed:
        raise BrokenError("the output is not that of the source as it is")
    scene.restore()
    return "begun anew"


def _is_of_changed_config(scene: Scene) -> bool:
    """Whether the output has the base's config as it was changed, and for the rest is what it should be."""
    config = scene.inputs / "base" / "config.json"
    if config.read_bytes() == scene.kept[config] or not verify(scene.out).ok:
        return False
    differ = (
        {"config.json"} <= set(_differences(scene)) <= {"config.json", "covmerge.json", "README.md"}
    )
    return differ and json.loads((scene.out / "config.json").read_text())["hidden_size"] == 17


def _change(scene: Scene, what: float, random: Random) -> None:
    content = scene.kept[scene.expert]
    if what < 0.3:
        scene.expert.write_bytes(scene.variant)
    elif what < 0.5:
        other = scene.expert.with_name("other")
        other.write_bytes(scene.variant)
        other.replace(scene.expert)
    elif what < 0.65:
        os.truncate(scene.expert, random.randrange(len(content)))
    elif what < 0.75:
        scene.expert.write_bytes(content + b"x")
    elif what < 0.9:
        scene.expert.unlink()
    else:
        (scene.inputs / "base" / "config.json").write_text('{"hidden_size": 17}')


def failing_reads(own: Set, random: Random) -> str:
    """A disk on which an expert lies, and reading fails from some read on."""
    scene, disk = own.scene, own.failing
    scene.expert.unlink()
    scene.expert.symlink_to(disk.place / scene.name)
    disk.fail_at(None)
    _good(own.run(executor="threads"))
    before, scene.expected = (
        scene.expected,
        digests(scene.out),
    )  # which names the file as it is called there
    try:
        disk.fail_at(random.randrange(disk.reads))
        scene.clear()
        (ended,) = own.over(*own.start())
        disk.fail_at(None)
        if not ended.code:
            own.whole()
            return "had ended"
        own.refused(ended, names=(scene.expert.name,))
        own.again(random)
        return "refused"
    finally:
        scene.restore()
        scene.expected = before


def unreadable(own: Set, random: Random) -> str:
    """Permission to read a source, or to write beside the output, that is taken away at a step."""
    scene = own.scene
    places = (scene.expert, scene.inputs / "base", scene.out.parent, scene.partial)
    place = random.choice(places)
    before = scene.out.parent.stat().st_mode

    def shut() -> None:
        if place.exists():
            place.chmod(0o500 if place in (scene.out.parent, scene.partial) else 0)

    at = At(random.randint(1, own.steps), shut)
    ended = own.over(*own.start(at=at, humble=True))
    scene.restore()
    scene.out.parent.chmod(before)
    if scene.partial.exists():
        scene.partial.chmod(0o755)
    bad = [one for one in ended if one.code]
    if not bad:
        if not own.finished():
            raise BrokenError("no output")
        return "had ended" if not scene.partial.exists() else "left its work behind"
    for one in bad:
        if not one.named:
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    own.again(random, may_refuse=True, humble=True)
    return "refused"


def two_at_once(own: Set, random: Random) -> str:
    """Two merges into one output: one is made, and the other is refused, or comes after it."""
    more = random.choice(([], ["--overwrite"]))
    first = own.start(*more)
    time.sleep(random.uniform(0, 0.3 * own.seconds))
    second = own.start(*more, executor="threads")
    ended = own.over(*first, *second)
    for one in ended:
        if one.code and not one.named:
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    good = sum(one.code == 0 for one in ended)
    if not good:
        said = "\n".join(one.said for one in ended)
        raise BrokenError(f"neither has made the output:\n{said}")
    own.whole()
    return "both, in turn" if good == len(ended) else "one was refused"


# glibc ends the process where a thread's own data finds no room, and asks no program: as a kill does.
_NO_THREAD_DATA = "cannot allocate memory for thread-local data: ABORT"


def no_memory(own: Set, random: Random) -> str:
    """An address space that is too small."""
    more = random.randrange(0, 96 << 20)
    return _out_of_memory(own, random, own.start(before=partial(limit_memory, more)))


def no_memory_for_worker(own: Set, random: Random) -> str:
    """The same of one worker."""
    (child,) = own.start(executor="processes")
    time.sleep(random.uniform(0, own.seconds))
    for worker in server_children()[:1]:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            limit_memory(random.randrange(0, 1 << 20), worker)
    return _out_of_memory(own, random, [child])


def small_budget(own: Set, random: Random) -> str:
    """A `--max-memory` that is too small, or just large enough."""
    given = ("--max-memory", str(random.randrange(1, 1 << 30)))
    return _out_of_memory(own, random, own.start(*given))


def _out_of_memory(own: Set, random: Random, children: Sequence[Child]) -> str:
    ended = own.over(*children)
    bad = [one for one in ended if one.code]
    by_glibc = [one for one in bad if one.code == 127 and _NO_THREAD_DATA in one.said]
    for one in bad:
        if not (one.named or one in by_glibc):
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    if not bad:
        own.whole()
        return "was enough"
    own.again(random)
    return "was ended by glibc" if by_glibc else "refused"


def torn_journal(own: Set, random: Random) -> str:
    """A page of the journal that is zeros or garbage, or its end is missing, before it is resumed."""
    return _torn(own, random, lambda: [own.scene.partial / "journal.jsonl"])


def torn_shard(own: Set, random: Random) -> str:
    """The same of a file of the unfinished output."""
    return _torn(
        own, random, lambda: [p for p in own.scene.partial.glob("output/**/*") if p.is_file()]
    )


def _torn(own: Set, random: Random, files: Callable[[], list[Path]]) -> str:
    own.over(*own.start(at=At(random.randint(own.steps // 3, own.steps), kill_self)))
    if own.finished() or not [path for path in files() if path.exists()]:
        return own.again(random)
    path = random.choice(files())
    content = bytearray(path.read_bytes())
    page = random.choice((64, 512, 4096))
    begin = random.randrange(0, len(content) + 1) // page * page
    torn = len(content[begin : begin + page])
    kind = random.choice(("zeros", "garbage", "missing"))
    if kind == "missing":
        del content[begin:]
    else:
        content[begin : begin + page] = bytes(torn) if kind == "zeros" else random.randbytes(torn)
    path.write_bytes(content)
    return own.again(random, may_refuse=True)


def requests_fail(own: Set, random: Random) -> str:
    """A bucket's server that fails, cuts connections or is slow, once, for a while or from then on."""
    return _unserved(own, random, random.choice((1, 2, 8, None)), random.choice(PASSING))


def requests_refused(own: Set, random: Random) -> str:
    """Permission for a bucket that is lost."""
    return _unserved(own, random, None, random.choice(REFUSED))


def _unserved(own: Set, random: Random, count: int | None, how: str) -> str:
    bucket = _bucket(own)
    bucket.wrong(random.randrange(own.requests), count, how)
    (ended,) = own.over(*own.start(before=_impatient))
    bucket.right()
    if not ended.code:
        own.whole()
        return "went on"
    return _told(own, random, ended)


def bucket_vanishes(own: Set, random: Random) -> str:
    """A bucket that is removed with all that it holds, and made again."""
    bucket = _bucket(own)
    bucket.wrong(random.randrange(own.requests), 1, HELD)
    (child,) = own.start(before=_impatient)
    if _until_held(own, child):
        bucket.vanish()
    bucket.right()
    ended = child.wait()
    bucket.make()
    own.scene.look()
    if ended.code:
        return _told(own, random, ended)
    if own.finished():
        return own.had_ended([child])
    if own.scene.left():
        raise BrokenError("ended well, with neither output nor room for one")
    own.again(random)
    return "had ended"


def kill_at_request(own: Set, random: Random) -> str:
    """`kill -9` before a request to a bucket is done, or when it is and nobody has heard of it."""
    (child,) = _held(own, random)
    if _until_held(own, child):
        child.kill()
    _bucket(own).right()
    (ended,) = own.over(child)
    return own.had_ended([child]) if ended.code == 0 else own.again(random)


def asked_to_end_at_request(own: Set, random: Random) -> str:
    """SIGINT or SIGTERM there."""
    number, code = random.choice(((signal.SIGINT, 130), (signal.SIGTERM, 143)))
    (child,) = _held(own, random)
    if _until_held(own, child):
        child.kill(number)
        if not _ends(child, _PROMPT):
            raise BrokenError(f"it did not end within {_PROMPT:.0f} s of the signal {number}")
    _bucket(own).right()
    (ended,) = own.over(child)
    if ended.code == 0:
        return own.had_ended([child])
    if ended.code != code:
        raise BrokenError(f"ended by {ended.code}:\n{ended.said}")
    return own.again(random)


def two_machines(own: Set, random: Random) -> str:
    """Another machine that merges into the same output while a request of this one is on its way."""
    scene = own.scene
    assert isinstance(scene, StoredScene)
    more = random.choice(((), ("--overwrite",)))
    (child,) = _held(own, random, *more)
    _until_held(own, child)
    other = own.run(*more, executor="threads", environment=scene.elsewhere)
    scene.bucket.right()
    (ended,) = own.over(child)
    for one in (ended, other):
        if one.code and not one.named:
            raise BrokenError(f"ended by {one.code}:\n{one.said}")
    good = sum(one.code == 0 for one in (ended, other))
    if not good:
        raise BrokenError(f"neither has made the output:\n{ended.said}\n{other.said}")
    if good == 2 and not more:
        raise BrokenError("what the other machine had made was replaced unasked")
    own.again(random)
    return "both, in turn" if good == 2 else "one was refused"


def _bucket(own: Set) -> Bucket:
    assert isinstance(own.scene, StoredScene)
    return own.scene.bucket


def _held(own: Set, random: Random, *more: str) -> list[Child]:
    """Start a merge of which one request is held."""
    _bucket(own).wrong(random.randrange(own.requests), 1, random.choice((HELD, HELD_DONE)))
    return own.start(*more)


def _until_held(own: Set, child: Child) -> bool:
    """Wait until a request is held, or the merge has ended."""
    while not _bucket(own).held:
        if _ends(child, 0.002):
            return False
    return True


def _ends(child: Child, seconds: float) -> bool:
    """Whether a process has ended within so many seconds; it can still be waited for."""
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _told(own: Set, random: Random, ended: Ended) -> str:
    """An error in words of a merge into a bucket, which may have been completed all the same."""
    if not ended.named:
        raise BrokenError(f"ended by {ended.code}:\n{ended.said}")
    if "s3://" not in ended.said:
        raise BrokenError(f"does not say where:\n{ended.said}")
    own.again(random)
    return "refused"


def _impatient() -> None:
    """Wait for a server as long as a campaign can."""
    link.WAITS = (0.01, 0.01)
    for kind in (servers._READING, servers._WRITING):
        kind["s3"]["config_kwargs"] |= {"read_timeout": 0.5}


def _good(ended: Ended) -> None:
    if ended.code:
        raise BrokenError(f"ended by {ended.code}:\n{ended.said}")


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        run: one trial.
        executors: those that it is tried with.
        weight: how often beside the others.
        disk: whether it needs a disk that can fill up.
        failing: whether it needs a disk that can fail.
        stored: whether it is one of buckets, or of folders alone; None: of both.
    """

    run: Callable[[Set, Random], str]
    executors: Sequence[str] = tuple(EXECUTORS)
    weight: int = 1
    disk: bool = False
    failing: bool = False
    stored: bool | None = None


FAULTS: Mapping[str, Fault] = {
    "kill -9 at an instant": Fault(kill_by_clock, (*EXECUTORS, _RAY), weight=5),
    "kill -9 between two steps": Fault(kill_at_step, (*EXECUTORS, _RAY), weight=5),
    "kill -9 in mid-write": Fault(kill_in_write, weight=3),
    "kill -9, and again while resumed": Fault(kill_twice, weight=2),
    "kill -9 while an output is replaced": Fault(kill_replacing, weight=2),
    "kill -9 of a worker": Fault(kill_worker, ("processes", "ranks", _RAY)),
    "node lost": Fault(lose_node, (_RAY,)),
    "SIGINT": Fault(partial(_interrupted, signal.SIGINT, 130)),
    "SIGTERM": Fault(partial(_interrupted, signal.SIGTERM, 143)),
    "disk full from the start": Fault(full_from_start, disk=True),
    "disk fills up": Fault(fills_up, disk=True),
    "limit on the size of files": Fault(limited_files, ("threads",)),
    "source changes": Fault(source_changes, weight=2),
    "source changes before it is resumed": Fault(source_changes_before_resume),
    "reading fails": Fault(failing_reads, ("threads", "processes"), failing=True),
    # Not those of a server of Python's that root has started.
    "permission lost": Fault(unreadable, ("threads", "ranks"), stored=False),
    "two processes on one output": Fault(two_at_once, ("threads", "processes")),
    "memory refused": Fault(no_memory, ("threads",)),
    "memory refused to a worker": Fault(no_memory_for_worker, ("processes",)),
    "--max-memory": Fault(small_budget, ("threads", "processes")),
    "page torn in the journal": Fault(torn_journal),
    "page torn in a shard": Fault(torn_shard),
    "requests to a bucket fail": Fault(requests_fail, weight=2, stored=True),
    "permission for a bucket lost": Fault(requests_refused, stored=True),
    "bucket vanishes": Fault(bucket_vanishes, stored=True),
    "kill -9 at a request to a bucket": Fault(kill_at_request, weight=2, stored=True),
    "SIGINT or SIGTERM at one": Fault(asked_to_end_at_request, stored=True),
    "another machine at one": Fault(two_machines, stored=True),
}


class Campaign:
    """Scenes in a folder, each with every executor."""

    def __init__(
        self, home: Path, disk: Disk, forms: Sequence[str], executors: Sequence[str]
    ) -> None:
        home.chmod(0o755)
        (home / "tmp").mkdir()
        (home / "tmp").chmod(0o1777)
        (home / "disk").chmod(0o777)
        self.disk = disk
        os.environ["TMPDIR"] = str(home / "tmp")
        self._home = home
        self.bucket = Bucket() if any(FORMS[form].stored for form in forms) else None
        scenes = [self._scene(form) for form in forms]
        self.sets: dict[tuple[str, str], Set] = {}
        (home / "failing").mkdir()
        experts = {scene.name: scene.kept[scene.expert] for scene in scenes}
        self.failing = FailingDisk(home / "failing", experts)
        self.nodes = Nodes() if _RAY in executors else None
        # Threads first: what they import is there for the server of the others.
        for executor in executors:
            for scene in scenes:
                if executor not in (scene.form.executors or executors):
                    continue
                own = self.sets[scene.name, executor] = Set(
                    scene, executor, home, disk, self.failing, self.nodes
                )
                own.measure()

    def _scene(self, form: str) -> Scene:
        (self._home / form).mkdir()
        places = self._home / form, self._home / "disk"
        scene = (
            StoredScene(form, *places, self.bucket)
            if self.bucket is not None and FORMS[form].stored
            else Scene(form, *places)
        )
        if os.geteuid() == 0:
            for path in (scene.inputs, *scene.inputs.rglob("*")):
                os.chown(path, 65534, 65534)
        return scene

    def trial(self, name: str, seed: int, number: int) -> tuple[str, str, str | None]:
        """Run one; return its executor, its outcome, and what is wrong."""
        random = Random(f"{seed} {name} {number}")
        fault = FAULTS[name]
        fits = [key for key, own in self.sets.items() if _fits(fault, own)]
        own = self.sets[
            random.choices(fits, [EXECUTORS.get(executor, 1) for _, executor in fits])[0]
        ]
        where = f"{own.scene.name}, {own.executor}"
        own.scene.clear()
        try:
            outcome = fault.run(own, random)
            if (wrong := own.scene.intact()) is not None:
                raise BrokenError(wrong)
            return own.executor, outcome, None
        except BrokenError as broken:
            return own.executor, "failed", f"{where}: {broken}"
        except Exception:
            return own.executor, "failed", f"{where}: {traceback.format_exc()}"
        finally:
            self.disk.widen()
            own.scene.out.parent.chmod(0o777)
            own.scene.restore()
            for path in (self._home / "disk").iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in self._home.glob("s*-[0-9]*"):
                path.unlink()

    def close(self) -> None:
        """Take off what was mounted."""
        self.failing.close()
        if self.bucket is not None:
            self.bucket.close()
        if self.nodes is not None:
            self.nodes.close()

    def fits(self, name: str) -> bool:
        """Whether a fault can be tried here."""
        fault = FAULTS[name]
        possible = any(_fits(fault, own) for own in self.sets.values())
        there = (self.disk.real or not fault.disk) and (self.failing.real or not fault.failing)
        return possible and there


def _fits(fault: Fault, own: Set) -> bool:
    """Whether a fault can happen to a merge."""
    there = fault.stored is None or fault.stored == own.scene.form.stored
    return there and own.executor in fault.executors


def run(
    campaign: Campaign, names: Sequence[str], seed: int, first: int, trials: int, seconds: float
) -> Outcomes:
    """Run trials of faults in turn, by their weights, and print what failed."""
    outcomes: Outcomes = {name: defaultdict(Outcome) for name in names if campaign.fits(name)}
    until = time.monotonic() + seconds
    for turn in range(trials):
        for name, by in outcomes.items():
            for part in range(FAULTS[name].weight):
                if time.monotonic() > until:
                    return outcomes
                number = first + turn * FAULTS[name].weight + part
                executor, ended, wrong = campaign.trial(name, seed, number)
                by[executor].counts[ended] += 1
                print(f"{name}, {executor} {number}: {ended}", file=sys.stderr, flush=True)
                if wrong is not None:
                    by[executor].failures[number] = wrong
                    told = wrong[-3000:].replace("\n", "\n    ")
                    print(f"{name}, seed {seed}, trial {number}: {told}", flush=True)
    return outcomes


def table(outcomes: Outcomes) -> str:
    """Return what became of the trials as a table in Markdown."""
    lines = ["| fault | by | trials | outcomes | failed |", "|---|---|---|---|---|"]
    every = [(name, by, own) for name, found in outcomes.items() for by, own in found.items()]
    for name, by, own in every:
        told = ", ".join(f"{n} {what}" for what, n in own.counts.most_common() if what != "failed")
        lines.append(f"| {name} | {by} | {own.trials} | {told} | {len(own.failures)} |")
    trials = sum(own.trials for _, _, own in every)
    failed = sum(len(own.failures) for _, _, own in every)
    return "\n".join([*lines, f"| all | | {trials} | | {failed} |"])


def as_json(outcomes: Outcomes) -> str:
    """Return the same as JSON."""
    return json.dumps(
        {
            name: {
                by: {"trials": own.trials, "outcomes": own.counts, "failures": own.failures}
                for by, own in found.items()
            }
            for name, found in outcomes.items()
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--executor", action="append", choices=(*EXECUTORS, _RAY))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trials", type=int, default=10**9, help="rounds over all faults")
    parser.add_argument("--json", type=Path, help="where the table is written as JSON")
    asked = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "NO_COLOR": "1"}
    import torch

    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="faults-") as folder:
        os.environ["COVMERGE_CACHE"] = f"{folder}/cache"
        home = Path(folder)
        with closing(Disk(home / "disk")) as disk:
            forms, executors = asked.form or list(FORMS), asked.executor or list(EXECUTORS)
            with closing(Campaign(home, disk, forms, executors)) as campaign:
                names, seconds = asked.fault or list(FAULTS), 60 * asked.minutes
                outcomes = run(campaign, names, asked.seed, asked.first, asked.trials, seconds)
        left_out = [name for name in names if not campaign.fits(name)]
        if left_out:
            print(f"cannot be tried here: {', '.join(left_out)}", flush=True)
    print(table(outcomes))
    if asked.json is not None:
        asked.json.write_text(as_json(outcomes))
    return 1 if any(own.failures for by in outcomes.values() for own in by.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
