"""A process that matches patterns and nothing else: `patterns` starts it, and its limits may end it.

It reads one question in JSON and writes one answer. It is run as a file, without covmerge or torch,
so that it starts at once.
"""

from __future__ import annotations

import json
import re
import sys

_MEMORY = 1 << 30

Found = tuple[int, str | None] | None


def answer(patterns: list[str], names: list[str], *, whole: bool) -> list[Found]:
    """Return for every name the number of the first pattern that matches, and its group `idx`.

    Args:
        patterns: regular expressions.
        names: what they are held against.
        whole: whether a pattern is about all of a name, or how it begins.

    Raises:
        ValueError: a pattern is no regular expression: which one, and why.
    """
    compiled: list[re.Pattern[str]] = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(pattern, str(error)) from error
    found: list[Found] = []
    for name in names:
        tried = (p.fullmatch(name) if whole else p.match(name) for p in compiled)
        first = next(((number, match) for number, match in enumerate(tried) if match), None)
        found.append(first and (first[0], first[1].groupdict().get("idx")))
    return found


def main() -> None:
    """Answer the question on stdin within so many seconds of computation, the only argument."""
    _limit(int(sys.argv[1]))
    fields, names = json.load(sys.stdin)
    found: dict[str, list[Found]] = {}
    refused: list[str] = []
    for field, (patterns, whole) in fields.items():
        try:
            found[field] = answer(patterns, names, whole=whole)
        except ValueError as error:
            refused = [field, *error.args]
            break
    json.dump({"refused": refused} if refused else {"found": found}, sys.stdout)


def _limit(seconds: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: `patterns` waits only so long
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


if __name__ == "__main__":
    main()
