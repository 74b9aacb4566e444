"""Text of users and strangers in Markdown, where it must show and do nothing."""

from __future__ import annotations

import re

from covmerge.base.text import printable

_MEANT = re.compile(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))")  # inside a word _ is nothing
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def one_line(text: str) -> str:
    r"""Return text as one line of what can be printed.

    Example:
        >>> one_line("a\n---\nb\x1b[2J")
        'a --- b\ufffd[2J'
    """
    return printable(" ".join(text.split()))


def inline(text: str) -> str:
    r"""Return text that Markdown shows as it is, in a paragraph or in the cell of a table.

    Example:
        >>> print(inline("a|b <img> _c_"))
        a\|b &lt;img&gt; \_c\_
    """
    shown = "".join(_HTML.get(c, c) for c in one_line(text))
    return _MEANT.sub(r"\\\1", shown)


def row(*cells: str) -> str:
    """Return a row of a table; cells are Markdown, of one line.

    Example:
        >>> row("a", "")
        '| a |  |'
    """
    return f"| {' | '.join(cells)} |"


def fenced(text: str, language: str) -> str:
    """Return a block of code that nothing in the code ends.

    Example:
        >>> fenced("x = 1", "python").splitlines()
        ['```python', 'x = 1', '```']
        >>> fenced("```", "").splitlines()[0]
        '````'
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
