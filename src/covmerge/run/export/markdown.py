"""Untrusted text in Markdown, where it must be shown and have no effect; metadata of model cards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import yaml
from yaml.events import (
    AliasEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from covmerge.base.errors import CheckpointError
from covmerge.base.text import printable
from covmerge.files.stores.regular_file import open_regular, read_some
from covmerge.plan.recipe.strict_yaml import yaml_events

_MEANT = re.compile(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))")  # inside a word, _ has no meaning
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def one_line(text: str) -> str:
    r"""Return text as one line of printable characters.

    Example:
        >>> one_line("a\n---\nb\x1b[2J")
        'a --- b\ufffd[2J'
    """
    return printable(" ".join(text.split()))


def inline(text: str) -> str:
    r"""Return text escaped so that Markdown shows it unchanged, in a paragraph or the cell of a table.

    Example:
        >>> print(inline("a|b <img> _c_"))
        a\|b &lt;img&gt; \_c\_
    """
    shown = "".join(_HTML.get(c, c) for c in one_line(text))
    return _MEANT.sub(r"\\\1", shown)


def row(*cells: str) -> str:
    """Return a row of a table; the cells are Markdown without line breaks.

    Example:
        >>> row("a", "")
        '| a |  |'
    """
    return f"| {' | '.join(cells)} |"


def fenced(text: str, language: str) -> str:
    """Return a block of code with a fence longer than any run of backticks in the code.

    Example:
        >>> fenced("x = 1", "python").splitlines()
        ['```python', 'x = 1', '```']
        >>> fenced("```", "").splitlines()[0]
        '````'
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


# Metadata at the head of a model card: some keys are read as text, from files that are not trusted.

_MAX_DEPTH = 64  # the parser's work grows with the square of the depth
_MAX_BYTES = 1 << 20  # a card that lists the results of a large benchmark has a third of this
_BLOCK = re.compile(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
# A mapping counts for two levels, so that texts below depth 2 are the node's text or the items of its list.
_NESTING: dict[type[Event], int] = {
    **{SequenceStartEvent: 1, SequenceEndEvent: -1},
    **{MappingStartEvent: 2, MappingEndEvent: -2},
}


def read_front_matter(card: Path, keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the texts under some keys of a card's metadata: a single text, or the texts of a list.

    Only the YAML syntax is read: no value is built and no alias is followed, so that memory stays bounded.

    Raises:
        CheckpointError: the card cannot be read, or its metadata is not YAML or is too long.
    """
    try:
        with open_regular(card) as file:
            head = read_some(file, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{card} cannot be read: {error.strerror}") from error
    text = head.decode("utf-8-sig", errors="replace")
    block = _BLOCK.match(text)
    if block is None:
        if len(head) == _MAX_BYTES and text.lstrip().startswith("---"):
            raise CheckpointError(f"{card} has more than {_MAX_BYTES} bytes of metadata")
        return {}
    try:
        return _texts(block[1], keys)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the metadata of {card} is no YAML ({reason})") from error


def _texts(text: str, keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    events = yaml_events(text, fast=True)
    for event in events:
        if isinstance(event, MappingStartEvent):
            nodes = _nodes(events)
            # The nodes of a mapping are keys and values in turn.
            pairs = zip(nodes, nodes, strict=False)
            return {key[0]: value for key, value in pairs if len(key) == 1 and key[0] in keys}
        if isinstance(event, ScalarEvent | SequenceStartEvent):
            break
    return {}


def _nodes(events: Iterator[Event]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each node of the mapping that has begun; an inner mapping has no texts."""
    texts: list[str] = []
    depth = 0
    for event in events:
        depth += _NESTING.get(type(event), 0)
        if depth < 0:
            return
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        if isinstance(event, ScalarEvent) and depth < 2 and event.value:
            texts.append(str(event.value))
        ends = isinstance(event, ScalarEvent | AliasEvent | SequenceEndEvent | MappingEndEvent)
        if depth == 0 and ends:
            yield tuple(texts)
            texts = []
