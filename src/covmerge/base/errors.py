"""Errors that name what is wrong, where, and what to do next.

The command line turns them into exit codes: `InputError` and its children mean 2 (bad input),
`CheckFailed` means 1 (the work was done and a check on it failed).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from covmerge.base.text import some

_LINE, _MESSAGE = 3000, 25_000  # most characters; a message's end has the next step
# Parts of an address that may be a secret: its user, and the values of its query.
_USER = re.compile(
    r"\b((?:[a-z][a-z0-9+.-]*:/{1,2}|(?:https?|s3|gs|hf):))[^\s/'\"@]+@", re.ASCII | re.I
)
_QUERY = re.compile(r"([?&][\w.-]+=)[^\s'\"&#]+", re.ASCII)


class CovmergeError(Exception):
    """Base of every error that covmerge raises on purpose.

    Args:
        message: what is wrong. The middle of a long message is left out, because strangers' files have
            names and values of any length. Users and query values of addresses are left out, as secrets.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        message = _QUERY.sub(r"\1...", _USER.sub(r"\1...@", message))
        lines = (_cut(line, _LINE) for line in message.split("\n"))
        super().__init__(_cut("\n".join(lines), _MESSAGE))


def _cut(text: str, most: int) -> str:
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]}... ({len(text) - 2 * half} characters) ...{text[-half:]}"


class InputError(CovmergeError):
    """Something given to covmerge cannot be used: a file, a tensor, a key, a value."""


class CheckpointError(InputError):
    """A checkpoint is missing, truncated, malformed or unsafe to read."""


class TensorError(InputError):
    """Tensors of the inputs do not fit together, or hold values that cannot be merged."""


class NotFiniteError(TensorError):
    """A tensor of an input holds NaN or Inf, or the computation on it gives NaN or Inf.

    `expert` None is the base; `problem` says what is wrong with the tensor, and what to do next.
    """

    def __init__(self, tensor: str, expert: str | None, problem: str) -> None:
        source = "the base" if expert is None else f"expert '{expert}'"
        super().__init__(f"'{tensor}' of {source} {problem}")
        self.tensor, self.expert, self.problem = tensor, expert, problem

    def __reduce__(self) -> tuple[type[NotFiniteError], tuple[str, str | None, str]]:
        """Return the arguments to build the error again: worker processes pickle it."""
        return NotFiniteError, (self.tensor, self.expert, self.problem)


class RecipeError(InputError):
    """A recipe, an option or a parameter is unknown or out of range."""


class ResourceError(InputError):
    """The machine lacks the memory or the disk space that the plan needs."""


class CheckFailed(CovmergeError):
    """The work was done, and a check on its result failed."""

    exit_code = 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or the list of known names.

    Example:
        >>> did_you_mean("tiess", ["ties", "ace"])
        " Did you mean 'ties'?"
        >>> did_you_mean("zzz", ["ties", "ace"])
        ' Known: ace, ties.'
    """
    names = sorted(set(known))
    near = get_close_matches(name, names, n=1)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""


def pattern_meant(pattern: str, names: Collection[str]) -> str:
    """Return advice for a pattern that matches none of some names: the pattern that was meant, or names.

    Example:
        >>> pattern_meant("*.atn.*", ["h.0.attn.weight", "h.0.mlp.weight"])
        "did you mean '*.attn.*'?"
        >>> pattern_meant("h.0.attn", ["h.0.attn.weight", "h.0.mlp.weight"])
        "did you mean '*h.0.attn.*'?"
        >>> pattern_meant("nix*", ["h.0.attn.weight", "h.0.mlp.weight", "norm.weight"])
        "they are called 'h.0.attn.weight', 'h.0.mlp.weight' and 1 more"
    """
    parts = {part for name in names for part in name.split(".")}
    nearest = re.sub(
        r"[^.*?\[\]]+",
        lambda part: next(iter(get_close_matches(part[0], parts, n=1)), part[0]),
        pattern,
    )
    inner = nearest.strip("*")
    for meant in (nearest, f"*{inner}.*", f"*{inner}*"):
        if any(fnmatchcase(name, meant) for name in names):
            return f"did you mean '{meant}'?"
    return f"they are called {some(names, 2, quoted=True)}"


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Turn the panic of a Rust library into an error. A panic is no `Exception`, so nobody would handle it.

    Raises:
        RuntimeError: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise RuntimeError(f"a library in Rust panicked: {error}") from error
