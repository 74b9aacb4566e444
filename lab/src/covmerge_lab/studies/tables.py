"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers.

    Example:
        >>> print(markdown(["layer", "gamma"], [["q", "0.3"]]))
        | layer | gamma |
        |---|---:|
        | q | 0.3 |
    """
    lines = [_line(columns), "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
