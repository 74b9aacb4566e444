"""Errors name what to do next; here in the form in which the caller asked: flags, a recipe, Python.

Messages are written with the flags of the command line, and with a recipe's keys where there is no flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from covmerge.base.errors import CovmergeError

Form = Literal["flags", "recipe", "python"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What stays as it is: a command to type, and names of files, tensors and experts, which are anybody's.
_AS_IT_IS = re.compile(r"(`covmerge [^`]*`|(?<!\w)'[^'\n]*'(?!\w))")
# Words that are values where messages have them, and not how the sentence goes on.
_VALUES = (
    r"(threads|processes|ranks|ray|random|none|all|some|float32|float64|bfloat16|float16|\d+|FILE"
    r"|SOURCE)\b"
)
# A flag with its value: the same in a recipe and in Python, {} for the value.
_VALUED = {
    "base-stats": ("base_statistics: {}", 'base_statistics="{}"'),
    "dtype": ("dtype: {}", 'dtype="{}"'),
    "executor": (None, 'executor="{}"'),
    "max-memory": (None, 'max_memory="{}"'),
    "method": ("method: {}", 'method="{}"'),
    "out-dtype": ("output: {{dtype: {}}}", 'out_dtype="{}"'),
    "rank": ("output: {{rank: {}}}", "rank={}"),
    "spectra": (None, 'spectra="{}"'),
}
# Without one. How a run is done is no recipe's business: there the flags stay.
_BARE = {
    "address": (None, "address"),
    "base-stats": ("base_statistics", "base_statistics"),
    "device": (None, "device"),
    "executor": (None, "executor"),
    "keep": ("keep", "keep"),
    "max-memory": (None, "max_memory"),
    "method": ("method", "method"),
    "patience": (None, "patience"),
    "overwrite": (None, "overwrite=True"),
    "rank": ("rank", "rank"),
    "resume": (None, "resume=True"),
    "whole": ("output: {whole: true}", "whole=True"),
    "workers": (None, "workers"),
}
_FORMATS = ("model", "adapter")


def in_form(message: str, form: Form) -> str:
    """Return a message with what it names said in another form.

    Example:
        >>> in_form("merge to a full model (--as model)", "recipe")
        'merge to a full model (`output: {format: model}`)'
        >>> in_form("leave them out by `tensors: {extra: ignore}`", "flags")
        'leave them out by `--tensors extra=ignore`'
        >>> in_form("pass --resume to go on", "python")
        'pass resume=True to go on'
    """
    parts = _AS_IT_IS.split(message)
    parts[::2] = [_translated(part, form) for part in parts[::2]]
    return "".join(parts)


def _translated(message: str, form: Form) -> str:
    if form == "flags":
        message = re.sub(r"`tensors: \{(\w+): ([^}`]+)\}`", r"`--tensors \1=\2`", message)
        message = message.replace("`base: SOURCE`", "`--base SOURCE`")
        return re.sub(r"(rule with `use: \w+`)", r"\1 to a recipe file", message)
    python = form == "python"

    def valued(found: re.Match[str]) -> str:
        said = _VALUED[found[1]][python]
        return found[0] if said is None else _quoted(said.format(found[2]), python=python)

    def bare(found: re.Match[str]) -> str:
        said = _BARE[found[1]][python]
        return found[0] if said is None else _quoted(said, python=python)

    def allowed(found: re.Match[str]) -> str:
        names = found[0].split()[1::2]
        listed = ", ".join(f'"{name}"' if python else name for name in names)
        return _quoted(f"allow=[{listed}]" if python else f"allow: [{listed}]", python=python)

    def shaped(found: re.Match[str]) -> str:
        if python:
            return f'form="{found[1]}"'
        names = "" if found[1] in _FORMATS else "adapter, names: "
        return f"`output: {{format: {names}{found[1]}}}`"

    start = r"(?<![\w`/.-])--"
    message = re.sub(rf"{start}allow [\w-]+(?: --allow [\w-]+)*", allowed, message)
    message = re.sub(rf"{start}as (\w+)", shaped, message)
    message = re.sub(rf"{start}({'|'.join(_VALUED)}) {_VALUES}", valued, message)
    message = re.sub(rf"{start}({'|'.join(_BARE)})(?![\w-])", bare, message)
    if python:
        message = re.sub(r"`tensors: \{(\w+): (\w+)\}`", r'`tensors={"\1": "\2"}`', message)
        message = re.sub(
            r"a rule with `use: (\w+)`", r'a rule {"match": NAME, "use": "\1"}', message
        )
    return message


def _quoted(text: str, *, python: bool) -> str:
    return text if python else f"`{text}`"


def told_in_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have the errors of a public function name its arguments, and not the command line's flags."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except CovmergeError as error:
            error.args = (in_form(str(error), "python"), *error.args[1:])
            raise

    return called
