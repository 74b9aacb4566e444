"""The program of a process that only matches patterns. `patterns` starts it with limits.

It reads one question in JSON and writes one answer. It runs as a file, without covmerge or torch,
so that it starts quickly.
"""

from __future__ import annotations

import json
import re
import sys

_MEMORY = 1 << 30

Found = tuple[int, str | None] | None


def answer(patterns: list[str], names: list[str], *, whole: bool) -> list[Found]:
    """Return for every name the number of the first pattern that matches it, and its group `idx`.

    `whole`: a pattern must match all of a name, and not only its beginning.

    Raises:
        ValueError: a pattern is no regular expression; it names the pattern and the reason.
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
    """Answer the question on stdin; the only argument is the limit of CPU time in seconds."""
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
    except ImportError:  # Windows has no such limit: `patterns` stops waiting after a while
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


if __name__ == "__main__":
    main()
