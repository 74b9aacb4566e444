"""Mutation testing: what of linalg/, covariance/, methods/ and steps/ no test would miss.

    python -m pip install -e ".[dev,mutation]"
    python -m tests.campaigns.mutation --sample 600 --seed 0 --out mutants.jsonl
    python -m tests.campaigns.mutation --module methods/auto --tests tests/methods/test_auto.py --sample 200

A mutant is one function with one change: an operator exchanged, a number off by one, an argument None or
left out, a condition forced. mutmut knows the changes (`mutmut.mutation.mutators`). Its own runner leaves
out functions that are decorated, and here all kernels are (`@register`); it also collects the tests anew
for each mutant, which takes longer than to run them. So tests are collected once, and each mutant is a
process forked off with the changed code put into the function that everybody has already imported. A
first run of all tests says which function is reached by which tests; a mutant is held against these, one
of each kind first, as far as `--each` seconds of them go.

Left out: what is said in an error (`raise`), annotations, `typing.cast`, decorators, defaults of
parameters, and what a module computes when it is imported. Results are appended to `--out`, and a mutant
that is there is not run again.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import CodeType, FunctionType
from typing import Any

import libcst as cst
import pytest
import torch
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_SOURCE = Path("src/covmerge/maths")
FOLDERS = ("linalg", "covariance", "methods", "steps")
TESTS = (*(f"tests/{folder}" for folder in FOLDERS), *(f"src/covmerge/maths/{f}" for f in FOLDERS))
_LONGEST = 1.0  # seconds of a test that takes part
_MEMORY = 4 << 30  # bytes beside what a process starts with

Place = tuple[str, str, int]  # file, name within it, first line


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    file: str
    function: str
    first_line: int
    line: int
    number: int  # within the file
    source: str  # of the file, changed

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line} {self.function} #{self.number}"

    @property
    def place(self) -> Place:
        return self.file, self.function, self.first_line

    def diff(self) -> str:
        """The changed lines."""
        lines = difflib.unified_diff(
            Path(self.file).read_text().splitlines(), self.source.splitlines(), n=0, lineterm=""
        )
        return "\n".join(
            line for line in lines if line[:3] not in ("---", "+++") and line[0] != "@"
        )


_Change = tuple[str, int, int, cst.CSTNode, cst.CSTNode]  # function, its line, line, node, changed


class _Changes(cst.CSTVisitor):
    """All changes within the functions of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.found: list[_Change] = []
        self._within: list[tuple[str, int]] = []  # functions and classes around, and first lines

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self._within.append((node.name.value, 0))

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:  # noqa: N802
        self._within.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._within.append((node.name.value, self._line((*node.decorators, node)[0])))

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        self._within.pop()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Raise, cst.Annotation, cst.Decorator, cst.Parameters)):
            return False
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Name)
            and node.func.value == "cast"
        ):
            return False
        function = next((place for place, own in enumerate(self._within) if own[1]), None)
        if function is not None:
            name = ".".join(own for own, _ in self._within[: function + 1])
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    for changed in operator(node):
                        first = self._within[function][1]
                        self.found.append((name, first, self._line(node), node, changed))
        return super().on_visit(node)

    def _line(self, node: cst.CSTNode) -> int:
        return self.get_metadata(PositionProvider, node).start.line


def changes_of(file: Path) -> int:
    """How many mutants a file has."""
    return len(_changes(file)[1])


def mutants_of(file: Path, numbers: Iterable[int]) -> Iterator[Mutant]:
    """Some of the mutants of a file."""
    module, changes = _changes(file)
    for number in numbers:
        name, first, line, node, changed = changes[number]
        source = module.deep_replace(node, changed)
        assert isinstance(source, cst.Module)
        yield Mutant(str(file), name, first, line, number, source.code)


def _changes(file: Path) -> tuple[cst.Module, list[_Change]]:
    wrapper = MetadataWrapper(cst.parse_module(file.read_text()))
    visitor = _Changes()
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


def drawn(sample: int | None, seed: int, modules: Sequence[str] = ()) -> tuple[int, list[Mutant]]:
    """How many mutants there are, and those to run, in the order of the draw."""
    paths = [_SOURCE / f"{own}.py" for own in modules] or files()
    every = [(path, number) for path in paths for number in range(changes_of(path))]
    chosen = every if sample is None else Random(seed).sample(every, min(sample, len(every)))
    numbers: dict[Path, list[int]] = defaultdict(list)
    for path, number in chosen:
        numbers[path].append(number)
    made = {
        (path, mutant.number): mutant
        for path, own in numbers.items()
        for mutant in mutants_of(path, own)
    }
    return len(every), [made[place] for place in chosen]


def files() -> list[Path]:
    """What is mutated."""
    return sorted(path for folder in FOLDERS for path in (_SOURCE / folder).glob("**/*.py"))


def _state(tests: Sequence[str]) -> str:
    """A short hash of all code and tests, and of which are run: what is reached is as good as they are."""
    found = hashlib.sha256("\n".join(tests).encode())
    for path in sorted([*Path("src").glob("**/*.py"), *Path("tests").glob("**/*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _codes(code: CodeType, within: str = "") -> Iterator[tuple[str, CodeType]]:
    """Functions and methods of a compiled module by their names, those within functions left out."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = f"{within}{inner.co_name}"
            if inner.co_flags & 0x2:  # its variables are its own: a function, and no class
                yield name, inner
            else:
                yield from _codes(inner, f"{name}.")


def _changed_code(mutant: Mutant) -> CodeType | None:
    """The function as changed; None where Python does not take it."""
    try:
        module = compile(
            mutant.source, str(Path(mutant.file).absolute()), "exec", dont_inherit=True
        )
    except (SyntaxError, ValueError):
        return None
    for name, code in _codes(module):
        if name == mutant.function and code.co_firstlineno == mutant.first_line:
            return code
    return None


class Session:
    """The part of the campaign that runs within pytest, once the tests are collected."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._items: dict[str, pytest.Item] = {}
        self._tests: dict[Place, list[str]] = {}
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings  # pytest wants to be the first to import it

        # A test that fails has failed: no smaller example is looked for.
        settings.register_profile(
            "mutation", settings.default, phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {
            item.nodeid: item for item in session.items if not item.get_closest_marker("slow")
        }
        self._session = session
        self._functions = self._live()
        gc.freeze()
        self._reached()
        self._run()
        return True

    def _live(self) -> dict[Place, list[FunctionType]]:
        """Functions as they were imported, whoever has decorated them."""
        gc.unfreeze()  # conftest.py has frozen them, and what is frozen is not listed
        wanted = {str(path.absolute()): str(path) for path in files()}
        found: dict[Place, list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename in wanted:
                name = one.__code__.co_qualname
                place = wanted[one.__code__.co_filename], name, one.__code__.co_firstlineno
                found[place].append(one)
        return found

    def _reached(self) -> None:
        """Run all tests once, and see which function is reached by which, and how long each takes."""
        places = {
            own.__code__: place for place, functions in self._functions.items() for own in functions
        }

        def work(say: Any) -> None:
            for nodeid, item in self._items.items():
                hit: set[Place] = set()

                def seen(frame: Any, event: str, _: Any, hit: set[Place] = hit) -> None:
                    if event == "call" and frame.f_code in places:
                        hit.add(places[frame.f_code])

                began = time.process_time()
                threading.setprofile(seen)
                sys.setprofile(seen)
                failed = self._fails([item])
                sys.setprofile(None)
                threading.setprofile(None)
                spent = time.process_time() - began
                say({"test": nodeid, "failed": failed, "seconds": spent, "hit": sorted(hit)})

        kept: Path = self._asked.out.with_suffix(f".{_state(list(self._items))}.reached")
        if not kept.exists():
            kept.write_text(json.dumps(_forked(work)[0]))
        reached: dict[Place, list[str]] = defaultdict(list)
        for told in json.loads(kept.read_text()):
            if told["failed"]:
                print(f"left out, as it fails: {told['test']}")
            elif told["seconds"] < _LONGEST:
                self._seconds[told["test"]] = told["seconds"]
                for place in told["hit"]:
                    reached[tuple(place)].append(told["test"])
        self._tests = {place: self._in_order(tests) for place, tests in reached.items()}
        print(f"{len(self._seconds)} tests of {sum(self._seconds.values()):.0f} s", flush=True)

    def _in_order(self, tests: Iterable[str]) -> list[str]:
        """One of each kind of test first, the shortest; then a second one, and so on."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self._seconds[test], test)):
            kinds[test.partition("[")[0]].append(test)
        turns = [(turn, test) for own in kinds.values() for turn, test in enumerate(own)]
        chosen: list[str] = []
        left = float(self._asked.each)
        for _, test in sorted(turns, key=lambda own: (own[0], self._seconds[own[1]])):
            left -= self._seconds[test]
            if left < 0:
                break
            chosen.append(test)
        return chosen

    def _fails(self, items: Sequence[pytest.Item]) -> bool:
        before = self._session.testsfailed
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed > before:
                return True
        return False

    def _run(self) -> None:
        out: Path = self._asked.out
        # Not a line left open: pytest takes its warning for a failure of the first test of every mutant.
        before = out.read_text().splitlines() if out.exists() else []
        done = {json.loads(line)["mutant"] for line in before}
        until = time.monotonic() + 60 * self._asked.minutes
        count, chosen = drawn(self._asked.sample, self._asked.seed, self._asked.module)
        chosen = [mutant for mutant in chosen if self._asked.only in mutant.key]
        print(f"{count} mutants, of which {len(chosen)} are run", flush=True)
        with out.open("a") as results:
            for mutant in chosen:
                if time.monotonic() > until:
                    break
                if mutant.key not in done:
                    found = self._outcome(mutant)
                    told = {"mutant": mutant.key, "outcome": found, "diff": mutant.diff()}
                    results.write(json.dumps(told, ensure_ascii=False) + "\n")
                    results.flush()

    def _outcome(self, mutant: Mutant) -> str:
        code = _changed_code(mutant)
        if code is None:
            return "no Python"
        functions = self._functions.get(mutant.place, [])
        if code in [own.__code__ for own in functions]:
            return "no change"
        tests = self._tests.get(mutant.place, [])
        if not tests:
            return "not reached"

        def work(say: Any) -> None:
            limit = int(4 * sum(self._seconds[test] for test in tests) + 10)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
            signal.alarm(100 * limit)  # it may wait for itself; and the machine may be busy
            for own in functions:
                own.__code__ = code
            say(self._fails([self._items[test] for test in tests]))

        said, in_time = _forked(work)
        if not in_time:
            return "no end"
        return "survived" if said == [False] else "killed"


def _forked(work: Any) -> tuple[list[Any], bool]:
    """Have a process work; what it said, and whether it ended before its time was over."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
        try:
            with os.fdopen(theirs, "w", buffering=1) as pipe:
                work(lambda said: pipe.write(json.dumps(said) + "\n"))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as heard:
        said = [json.loads(line) for line in heard]
    _, status = os.waitpid(pid, 0)
    return said, os.waitstatus_to_exitcode(status) not in (-signal.SIGXCPU, -signal.SIGALRM)


def table(out: Path) -> str:
    """Return the score by folder as a table in Markdown."""
    counts: dict[str, Counter[str]] = {folder: Counter() for folder in FOLDERS}
    for line in out.read_text().splitlines():
        told = json.loads(line)
        counts[Path(told["mutant"].split(":")[0]).relative_to(_SOURCE).parts[0]][
            told["outcome"]
        ] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = [
        "| folder | mutants | killed | survived | not reached | score |",
        "|---|---|---|---|---|---|",
    ]
    for folder, own in counts.items():
        killed, lived, missed = (own[k] for k in ("killed", "survived", "not reached"))
        killed += own["no end"]
        of = killed + lived + missed
        lines.append(
            f"| {folder} | {of} | {killed} | {lived} | {missed} | {killed / max(1, of):.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="so many of them, drawn by --seed; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="those whose `file:line function` has this in it"
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        help="these alone, such as linalg/refined; more than once",
    )
    parser.add_argument("--tests", nargs="+", default=TESTS, help="held against these alone")
    parser.add_argument("--nightly", action="store_true", help="held against every test")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--each", type=float, default=15.0, help="seconds of tests a mutant")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    asked = parser.parse_args(arguments)
    unknown = [own for own in asked.module if not (_SOURCE / f"{own}.py").is_file()]
    if unknown:
        parser.error(f"--module {unknown[0]}: there is no {_SOURCE / unknown[0]}.py")
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="mutants-") as folder:
        given = [
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--basetemp={folder}/tests",
        ]
        given += ["--nightly"] if asked.nightly else []
        pytest.main([*given, "-m", "not slow", *asked.tests], plugins=[Session(asked)])
    print(table(asked.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
