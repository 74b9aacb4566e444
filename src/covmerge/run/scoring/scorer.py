"""The protocol of a scorer, the scorers by name, and commands as scorers."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import IO, Any, Protocol, runtime_checkable

from covmerge.base.errors import CheckFailed, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import printable
from covmerge.run.scoring.files import by_evaluators, by_texts
from covmerge.run.scoring.lm_eval import by_tasks
from covmerge.run.scoring.values import Scores, printed_scores, scores_of

# A command as a scorer: it runs once for each model, without a shell.

MODEL = "{model}"  # placeholder of the model's folder
# Environment variable with the number of a command, from 0, among the commands that run at once.
NUMBER = "COVMERGE_SCORER"
_LINES, _WIDTH = 10, 300  # limits of the shown output of a failed command
_MOST_BYTES = 2**26  # of a command's output, and of a file that is hashed into the key
_SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>"})
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "fish"})
_BY_SHELL = '\'sh -c "python eval.py \\"$1\\" | tail -n 1" sh {model}\''


class Command:
    """A command in which `{model}` stands for the model's folder.

    The command is split into words as a shell does it, and then the folder replaces `{model}`. The
    folder stays part of one word, whatever characters it has. Nothing else is interpreted. `known` has the
    names of scorers, for an error.

    Raises:
        InputError: the text cannot be split into words, has no `{model}`, or needs a shell.

    Example:
        >>> Command("python eval.py --model {model}").words(Path("a b"))
        ['python', 'eval.py', '--model', 'a b']
    """

    def __init__(self, text: str, known: Collection[str] = ()) -> None:
        self.name = text
        self._running: set[subprocess.Popen[bytes]] = set()
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise InputError(
                f"{Hint('score')} {text!r} cannot be split into words ({error}): correct its quotes"
            ) from error
        if not any(MODEL in word for word in self._words):
            raise InputError(
                f"{Hint('score')} {text!r} does not say where the model's folder goes: write {MODEL} "
                f"there, as in 'python eval.py {MODEL}'; or name a scorer: {', '.join(known)}"
            )
        shell = _SHELL_WORDS.intersection(self._words)
        if shell:
            raise InputError(
                f"{Hint('score')} has {min(shell)!r}, and no shell runs it: call one, as in {_BY_SHELL}"
            )
        if _in_script(self._words):
            raise InputError(
                f"{Hint('score')} has {MODEL} inside a script, where a shell would interpret the "
                f"folder's name: pass it to the script, as in {_BY_SHELL}"
            )

    @property
    def key(self) -> str:
        """A hash of the command and of the contents of the files that it names."""
        found = hashlib.sha256(self.name.encode())
        for word in self._words:
            for name in (word, word.partition("=")[2]):  # the second is FILE in `--data=FILE`
                if name and MODEL not in name and _is_small_file(name):
                    found.update(hashlib.sha256(Path(name).read_bytes()).digest())
        return found.hexdigest()

    def check(self) -> None:
        if shutil.which(self._words[0]) is None:
            raise InputError(
                f"{Hint('score')}: there is no program {self._words[0]!r}: name one that is installed, "
                "or its path"
            )

    def words(self, model: Path) -> list[str]:
        """Return the command for one model."""
        return [word.replace(MODEL, str(model)) for word in self._words]

    def score(self, model: Path, number: int = 0, stopped: Event | None = None) -> Scores:
        """Run the command on a model; `number` is its place among the commands that run at once.

        If `stopped` is set, the command is killed as soon as it has started.
        """
        command = self.words(model)
        shown = printable(shlex.join(command))
        with TemporaryFile() as printed, TemporaryFile() as said:
            try:
                ended = self._ended(command, printed, said, number, stopped)
            except OSError as error:
                raise CheckFailed(f"`{shown}` cannot be run: {error.strerror}") from error
            if ended:
                how = f"ended with {ended}" if ended > 0 else f"was ended by signal {-ended}"
                last = _tail(said) or _tail(printed)
                output = f". Its last lines:\n{last}" if last else ", and printed nothing"
                raise CheckFailed(f"`{shown}` {how}{output}")
            printed.seek(0)
            text = printed.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise CheckFailed(
                f"`{shown}` printed more than {_MOST_BYTES} bytes: have it print less"
            )
        return printed_scores(text.decode(errors="replace"), f"`{shown}`")

    def _ended(
        self,
        command: list[str],
        out: IO[bytes],
        err: IO[bytes],
        number: int,
        stopped: Event | None,
    ) -> int:
        env = {**os.environ, NUMBER: str(number)}
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env
        ) as process:
            self._running.add(process)
            if stopped is not None and stopped.is_set():
                process.kill()
            try:
                return process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                self._running.discard(process)

    def stop(self) -> None:
        """Kill the commands that run in all threads."""
        for process in list(self._running):
            process.kill()


def _is_small_file(word: str) -> bool:
    try:
        found = Path(word).stat()
    except (OSError, ValueError):  # for example, a script is too long for a file name
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES


def _in_script(command: Sequence[str]) -> bool:
    """Return whether the folder's name would be part of a script that a shell interprets."""
    if Path(command[0]).name not in _SHELLS:
        return False
    return any(
        flag.startswith("-") and not flag.startswith("--") and "c" in flag and MODEL in script
        for flag, script in pairwise(command)
    )


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - _LINES * 10 * _WIDTH))
    lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
    shown = [f"  {printable(line)[:_WIDTH]}" for line in lines if line]
    return "\n".join(shown[-_LINES:])


@runtime_checkable
class Scorer(Protocol):
    """An object that scores models."""

    @property
    def name(self) -> str:
        """The shown name of the scorer: the command, or a name with its tasks."""
        ...

    @property
    def key(self) -> str | None:
        """A key of all that a score depends on beside the model; None if unknown: no score is saved."""
        ...

    def check(self) -> None:
        """Raise, before any merge begins, if the scorer cannot run."""

    def score(self, model: Path) -> Scores:
        """Score a model.

        Raises:
            CovmergeError: scoring failed; the message says how.
        """
        ...


# A caller may pass a command, a name, a scorer object, or a function that takes a folder.
AnyScorer = str | Scorer | Callable[[Path], Any]


@dataclass(frozen=True)
class Named:
    """A scorer that has a name, followed by a colon and arguments."""

    open: Callable[[Sequence[str]], Scorer]
    package: str  # that the scorer needs
    install: str  # argument of `pip install` for the package
    example: str  # of the arguments


NAMED: Mapping[str, Named] = {
    "lm-eval": Named(by_tasks, "lm_eval", '"lm-eval[hf]"', "arc_easy,gsm8k"),
    "sentence-transformers": Named(
        by_evaluators, "sentence_transformers", "sentence-transformers", "sts.csv"
    ),
    "transformers": Named(by_texts, "transformers", "transformers", "test.csv"),
}


def scorer_of(given: AnyScorer) -> Scorer:
    """Return the scorer for a command, a name, an object or a function."""
    if isinstance(given, str):
        name, colon, arguments = given.partition(":")
        if colon and name in NAMED:
            return _named(name, arguments)
        return Command(given, [f"{name}:{named.example}" for name, named in NAMED.items()])
    return given if isinstance(given, Scorer) else _Function(given)


def _named(name: str, arguments: str) -> Scorer:
    named = NAMED[name]
    if importlib.util.find_spec(named.package) is None:
        raise InputError(f"{Hint('score')} {name}: needs a package: pip install {named.install}")
    wanted = [part.strip() for part in arguments.split(",") if part.strip()]
    if not wanted:
        raise InputError(
            f"{Hint('score')} {name}: does not say what to score on: write {name}:{named.example}"
        )
    return named.open(wanted)


class _Function:
    """A caller's function of a folder. Its dependencies are unknown, so its scores are not saved."""

    key = None

    def __init__(self, function: Callable[[Path], Any]) -> None:
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def check(self) -> None:
        if not callable(self._function):
            raise InputError(
                f"score: {self._function!r:.200} is no scorer: pass a command with {{model}} in it, or a "
                "function of a folder"
            )

    def score(self, model: Path) -> Scores:
        return scores_of(self._function(model), f"score: {self.name}")
