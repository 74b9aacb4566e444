"""Names and values written for people, on terminals and on pages."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def printable(text: str) -> str:
    r"""Return text with all characters replaced that could control a terminal.

    Names come from strangers' files.

    Example:
        >>> printable("layer\x1b[2J\nnext")
        'layer�[2J\nnext'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def shown(value: object) -> str:
    """Write a value of a recipe or a config for a message: as JSON, with text in Python's quotes.

    Example:
        >>> print(shown(None), shown("null"), shown(float("nan")), shown([None, True, "a"]))
        null 'null' NaN [null, true, "a"]
    """
    if isinstance(value, str):
        return repr(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # values that only Python has
        return repr(value)


def as_written(value: object) -> str:
    """Write a value as a recipe has it: as JSON, but text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def some(names: Iterable[str], limit: int = 4, *, quoted: bool = False, between: str = ", ") -> str:
    """Write the first few names, and the number of the others.

    Example:
        >>> some(["a", "b", "c"], limit=2), some(["a", "b"], limit=1, quoted=True)
        ('a, b and 1 more', "'a' and 1 more")
    """
    shown = [f"'{name}'" if quoted else name for name in names]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return between.join(shown[:limit]) + more


def spread(values: Collection[int]) -> str:
    """Write the range of some numbers, from the least to the largest.

    Example:
        >>> spread([3, 3]), spread([8, 2, 4])
        ('3', '2 to 8')
    """
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Write a count with its noun.

    Example:
        >>> counted(1, "check"), counted(2, "matrix", "matrices")
        ('1 check', '2 matrices')
    """
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def keep_plain(names: Iterable[str]) -> str:
    """Write the advice to leave such tensors out of a quantised output, with a pattern for all layers.

    Example:
        >>> keep_plain(["h.0.up.weight", "h.1.up.weight", "h.0.down.weight"])
        "keep such tensors plain (keep: ['h.*.up.weight', 'h.*.down.weight'])"
    """
    return f"keep such tensors plain (keep: {list(dict.fromkeys(map(of_all_layers, names)))})"


def of_all_layers(name: str) -> str:
    """Return a pattern that matches a tensor in every layer, and in every expert of a layer.

    Example:
        >>> of_all_layers("model.layers.0.mlp.experts.12.w1.weight")
        'model.layers.*.mlp.experts.*.w1.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of some patterns, such as `*.json`; case counts."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
