"""The names of settings in messages: flags of the command line, keys of a recipe, arguments in Python."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shlex import quote
from typing import Literal, TypeAlias

# The method that is used where the user names none.

UNNAMED = ""  # the method's name where none is named
UNNAMED_NOTE = "no method is named: "  # the start of a note that says which one is used
ALONE, PREFERRED = "average", "auto"  # for one expert, and for several
# The same rule in words, for help, docstrings, schema and docs; `tests/e2e/test_choice.py` checks them.
TAKEN = f"`{ALONE}` of one expert alone, which is added to its base, and `{PREFERRED}` of several"


def choose(count: int) -> tuple[str, str]:
    """Return the method for a number of experts where none is named, and the reason.

    On average over the bank's sets of experts, `auto` loses less than any single method without data
    (lab/docs/bank.md).

    Example:
        >>> choose(1)[0], choose(4)[0]
        ('average', 'auto')
    """
    if count == 1:
        return ALONE, "one expert alone is added to its base, by its weight"
    return PREFERRED, "on average it comes nearest to the best method for several experts"


Caller = Literal["flags", "recipe", "python"]
Value: TypeAlias = (
    "str | float | Sequence[str] | list[float] | Mapping[str, str | float | list[float]] | None"
)

# Flags that differ from the argument's name with hyphens.
FLAGS = {
    "experts": "expert",
    "form": "as",
    "kinds": "kind",
    "objectives": "objective",
    "parameters": "set",
    "statistics": "stats",
    "weights": "weight",
}
# Keys of a recipe. Settings of how a run is carried out (threads, memory) are not in a recipe.
KEYS = {
    "after": "after",
    "allow": "allow",
    "base": "base",
    "before": "before",
    "decay": "run.decay",
    "dtype": "dtype",
    "form": "output.format",
    "keep": "output.keep",
    "last": "run.last",
    "method": "method",
    "out_dtype": "output.dtype",
    "parameters": "parameters",
    "quantise": "output.quantise",
    "rank": "output.rank",
    "rules": "rules",
    "shard_size": "output.shard_size",
    "statistics": "experts.*.statistics",
    "tensors": "tensors",
    "tokenizer": "tokenizer.source",
    "tokens": "run.tokens",
    "tokens_per_step": "run.tokens_per_step",
    "weights": "experts.*.weight",
    "whole": "output.whole",
}
LISTS = ("allow", "keep", "kinds", "objectives")
SWITCHES = ("deep", "lenient", "overwrite", "private", "resume", "whole")
# Settings that Python writes in another form than `name=value`.
IN_PYTHON = {"inputs": "examples=Generated()"}
# One value for the process, not a context variable, which a run's threads would not inherit.
_caller: Caller = "python"


@contextmanager
def hints_for(caller: Caller) -> Generator[None]:
    """Have the messages of this process name settings as this caller writes them."""
    global _caller
    before, _caller = _caller, caller
    try:
        yield
    finally:
        _caller = before


def caller_now() -> Caller:
    """Return for which caller this process names settings now."""
    return _caller


@dataclass(frozen=True)
class Hint:
    """A setting and its value; its text is a flag, a recipe key or a Python argument.

    Example:
        >>> hint = Hint("out_dtype", "float32")
        >>> for caller in ("flags", "recipe", "python"):
        ...     with hints_for(caller):
        ...         print(hint)
        --out-dtype float32
        `output: {dtype: float32}`
        out_dtype="float32"
    """

    setting: str  # its name as an argument in Python
    value: Value = None  # the value to set; None: no particular value

    def __str__(self) -> str:
        value = True if self.value is None and self.setting in SWITCHES else self.value
        if _caller == "python":
            return _in_python(self.setting, value)
        if _caller == "recipe" and self.setting in KEYS:
            return f"`{_in_recipe(self.setting, value)}`"
        return _as_flag(self.setting, value)


def rules_for(*matches: str, use: str = "base") -> str:
    """Return how messages write one or several rules, in a recipe or as an argument; no flag sets rules.

    Example:
        >>> rules_for("*.norm.*")
        'rules=[{"match": "*.norm.*", "use": "base"}]'
        >>> with hints_for("recipe"):
        ...     rules_for("*.norm.*", use="head")
        "the rule {match: '*.norm.*', use: head}"
    """
    if _caller == "python":
        return f"rules={json.dumps([{'match': match, 'use': use} for match in matches])}"
    shown = " and ".join(f"{{match: '{match}', use: {use}}}" for match in matches)
    where = " of a recipe" if _caller == "flags" else ""
    return f"the rule{'s' if len(matches) > 1 else ''} {shown}{where}"


def flag_of(name: str) -> str:
    """Return the flag of a setting.

    Example:
        >>> flag_of("max_memory"), flag_of("form")
        ('--max-memory', '--as')
    """
    return f"--{FLAGS.get(name, name).replace('_', '-')}"


def setting_named(path: Sequence[str | int], caller: Caller) -> str | None:
    """Return the flag or argument that a recipe's key was made of; None: there is none.

    Example:
        >>> setting_named(("output", "dtype"), "python"), setting_named(("output", "dtype"), "flags")
        ('out_dtype', '--out-dtype')
        >>> setting_named(("experts", "a", "weight"), "python"), setting_named(("rules", 0), "recipe")
        ("weights['a']", None)
    """
    for name, key in KEYS.items():
        parts = key.split(".")
        fits = len(path) >= len(parts) and all(
            part in ("*", item) for part, item in zip(parts, path, strict=False)
        )
        if fits and caller != "recipe":
            inner = [item for part, item in zip(parts, path, strict=False) if part == "*"]
            inner += path[len(parts) :]
            if caller == "python" and name == "parameters" and inner:
                return str(inner[0])
            if caller == "python":
                return name + "".join(f"[{item!r}]" for item in inner)
            return " ".join([flag_of(name), ".".join(map(str, inner))]).strip()
    return None


def _as_flag(name: str, value: Value) -> str:
    flag = flag_of(name)
    if isinstance(value, Mapping):
        settings = {
            key: quote(f"{key}={item}") if isinstance(item, list) else f"{key}={item}"
            for key, item in value.items()
        }
        return " ".join(f"{flag} {one}" for one in settings.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(f"{flag} {item}" for item in value)
    return flag if value is None or value is True else f"{flag} {value}"


def _in_recipe(name: str, value: Value) -> str:
    if value is None:
        return KEYS[name]
    *around, key = KEYS[name].split(".")
    if name == "form" and value not in ("model", "adapter"):
        value = f"adapter, names: {value}"
    if "*" in around and isinstance(value, Mapping):
        ((expert, value),) = value.items()
        around[around.index("*")] = expert
    text = f"{key}: {_yaml(value)}"
    for outer in reversed(around):
        text = f"{outer}: {{{text}}}"
    return text


def _in_python(name: str, value: Value) -> str:
    if name in IN_PYTHON:
        return IN_PYTHON[name]
    if name == "parameters" and isinstance(value, Mapping):
        return ", ".join(f"{key}={json.dumps(item)}" for key, item in value.items())
    if value is None:
        return name
    if name in LISTS and isinstance(value, str):
        value = [value]
    return f"{name}={value if value is True else json.dumps(value)}"


def _yaml(value: Value) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}"
    if isinstance(value, str):
        return value
    return f"[{', '.join(map(str, value))}]" if isinstance(value, Sequence) else json.dumps(value)
