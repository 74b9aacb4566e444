"""JSON as a tree that can be what no parser makes: keys twice, NaN, numbers without end, odd nesting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

# Relative to an input, and to the working directory.
OUTSIDE, TRIP = "../outside", "sprung"


class Pairs(list[Any]):
    """An object: lists of a key and a value, in which a key may stand twice."""


class Raw(str):
    """Text that is written as it is."""

    __slots__ = ()


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1),
    *(2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-320, 1e39, 1e308),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "01", "1.", "0x10")),
    *map(Raw, ("9" * 400, "9" * 5000, "-" + "9" * 5000, "1e-999", "0.1e1")),
)
TEXTS: tuple[Any, ...] = (
    *(
        "",
        " ",
        ".",
        "..",
        "../x",
        "a/b",
        "/",
        "\\",
        "a\\b",
        "\0",
        "a\0b",
        "\n",
        "\r\n",
        "\x1b[2J\x07",
    ),
    *("\ud800", "a\udfffb", "\N{GRINNING FACE}", "\u202eabc", "\ufeff", "\u2028", "é", "e\u0301"),
    *(
        "x" * 999,
        "x" * 1001,
        "x" * 70_000,
        "*",
        "**",
        "?",
        "[",
        "(a+)+$",
        "(?<=a",
        "((((((((((",
        "%s%n",
    ),
    *(
        "{0}",
        "{{7*7}}",
        "{% for i in range(9**9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "~",
        "~nobody/x",
    ),
    *(
        "null",
        "true",
        "NaN",
        "1e5",
        "-1",
        "0",
        "1.0",
        "auto",
        "base",
        "none",
        "float32",
        "BF16",
        "F64",
        "I4",
    ),
    *(
        "torch.float8_e4m3fn",
        "os.system",
        "__class__",
        "__metadata__",
        "s3://b/x",
        "http://127.0.0.1:9/x",
    ),
    *(
        "file:///etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/mem",
        "config.json",
        "model.safetensors",
    ),
    *(OUTSIDE, f"{OUTSIDE}/model.safetensors", f"$(touch {TRIP})"),
    *("all-linear", "regex:.*", "org/name", "CON", "-rf", "--", "con.", "\u0130", "1" * 30),
)
EMPTY: tuple[Any, ...] = (None, True, False, [], Pairs(), [[]], [None], Pairs([["", None]]))


def parse(text: str) -> Any:
    """Return the tree of a valid text."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def from_plain(value: Any) -> Any:
    """Return the tree of plain data."""
    return parse(json.dumps(value))


def write(tree: Any, random: Random | None = None) -> str:
    """Return the text of a tree; with `random`, sometimes in unusual but valid notation."""
    escape = random is None or random.random() < 0.8
    gap = "" if random is None or random.random() < 0.9 else random.choice((" ", "\n", "\t \r\n"))
    return "".join(_written(tree, escape, gap))


def _written(tree: Any, escape: bool, gap: str) -> Iterator[str]:
    if isinstance(tree, Raw):
        yield str(tree)
    elif isinstance(tree, Pairs):
        yield "{"
        for number, (key, value) in enumerate(tree):
            yield ("," if number else "") + gap
            yield from _written(key, escape, gap)
            yield ":" + gap
            yield from _written(value, escape, gap)
        yield "}"
    elif isinstance(tree, list):
        yield "["
        for number, value in enumerate(tree):
            yield ("," if number else "") + gap
            yield from _written(value, escape, gap)
        yield "]"
    else:
        yield json.dumps(tree, ensure_ascii=escape)


def edge(random: Random, near: Any = None) -> Any:
    """Draw a value: mostly of the kind of another, at its edges, or a little off."""
    kind = random.random()
    if isinstance(near, bool) or near is None:
        choice: tuple[Any, ...] = (*EMPTY, *NUMBERS[:4], *TEXTS[:3])
    elif isinstance(near, int | float) and kind < 0.4:
        return random.choice(
            (near + 1, near - 1, -near, near * 2, near // 2, float(near), str(near))
        )
    elif isinstance(near, int | float):
        choice = NUMBERS
    elif isinstance(near, str) and kind < 0.4:
        return _text_near(near, random)
    else:
        choice = TEXTS
    if kind > 0.85:
        choice = (*EMPTY, *NUMBERS, *TEXTS)
    return random.choice(choice)


def _text_near(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    piece = random.choice(
        ("", ".", "/", "..", "\0", "\ud800", " ", "0", "9" * 20, "é", text, text[:at])
    )
    end = random.choice((at, at + 1, len(text)))
    changed = text[:at] + piece + text[end:]
    numbers = list(re.finditer(r"[0-9]+", text))
    if numbers and random.random() < 0.4:  # the number of a layer, or of a shard
        found = random.choice(numbers)
        other = random.choice(("0", "1", "-1", "00", "99999", "9" * 19, "9" * 5000, "²", "x"))
        changed = text[: found.start()] + other + text[found.end() :]
    return changed


Slot = tuple[list[Any], int]


def _slots(tree: Any) -> list[Slot]:
    """All places of a tree at which a value lies; of a list with one value, the tree itself."""
    found: list[Slot] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Pairs):
            found += [(pair, 1) for pair in node]
            waiting += [pair[1] for pair in node]
        elif isinstance(node, list):
            found += [(node, index) for index in range(len(node))]
            waiting += node
    return found


def mutate(tree: Any, random: Random) -> Any:
    """Change one thing; the tree is the caller's to give away."""
    root = [tree]
    slots = _slots(root)
    # The top is one of thousands of places otherwise, and the most interesting.
    shallow = [slot for slot in slots[:60]]
    holder, index = random.choice(shallow if random.random() < 0.5 else slots)
    random.choice(_CHANGES)(holder, index, slots, random)
    return root[0]


def _to_edge(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    holder[index] = edge(random, holder[index])


def _to_other(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    holder[index] = random.choice((*EMPTY, *NUMBERS, *TEXTS))


def _drop(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    node = holder[index]
    if isinstance(node, list) and node:
        del node[random.randrange(len(node))]


def _double(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    node = holder[index]
    if isinstance(node, Pairs) and node:
        key, value = random.choice(node)
        node.append([key, random.choice((value, edge(random, value)))])
    elif isinstance(node, list) and node:
        node += node[: random.choice((1, len(node)))]


def _rename(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    node = holder[index]
    if isinstance(node, Pairs) and node:
        pair = random.choice(node)
        other = random.choice(node)[0]
        pair[0] = random.choice((edge(random, pair[0]), other, _text_near(str(pair[0]), random)))
        if isinstance(pair[0], str) or random.random() < 0.1:
            return
        pair[0] = str(pair[0])


def _swap(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    other, at = random.choice(slots)
    if other is not holder:
        holder[index] = _copy(other[at])


def _add(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    node = holder[index]
    if isinstance(node, Pairs):
        node.append([random.choice([t for t in TEXTS if isinstance(t, str)]), edge(random, 1)])
    elif isinstance(node, list):
        node.insert(random.randrange(len(node) + 1), edge(random, node[0] if node else 1))


def _wrap(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    node = holder[index]
    holder[index] = random.choice(([node], Pairs([["x", node]]), [node, node]))


def _deep(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    depth = random.choice((3, 20, 60, 70, 120, 990, 1100, 5000, 100_000))
    opened, closed = random.choice((("[", "]"), ('{"a":', "}"), ('[{"":', "}]")))
    inner = random.choice(("1", "[]", '"x"'))
    holder[index] = Raw(
        opened * depth + inner + closed * random.choice((depth, depth, depth - 1, 0))
    )


def _many(holder: list[Any], index: int, slots: list[Slot], random: Random) -> None:
    count = random.choice((100, 3000, 3000, 120_000))
    holder[index] = Raw(
        random.choice(
            (
                "[" + ",".join(["0"] * count) + "]",
                "{" + ",".join(f'"k{n}":0' for n in range(count)) + "}",
                "[" + ",".join(["[]"] * count) + "]",
            )
        )
    )


def _copy(tree: Any) -> Any:
    if isinstance(tree, Pairs):
        return Pairs([key, _copy(value)] for key, value in tree)
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


_CHANGES: list[Callable[[list[Any], int, list[Slot], Random], None]] = [
    *[_to_edge] * 6,
    *[_to_other] * 3,
    *[_drop, _double, _rename] * 2,
    *[_swap, _add, _wrap],
    *[_deep, _many],
]
