"""Bytes and lines, changed without regard to what they mean."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.campaigns.trees import TEXTS, TRIP

_WORDS = tuple(
    value.to_bytes(size, order)
    for size in (1, 2, 4, 8)
    for value in (
        0,
        1,
        127,
        128,
        255,
        2 ** (8 * size) - 1,
        2 ** (8 * size - 1),
        2 ** (8 * size - 1) - 1,
    )
    if value < 2 ** (8 * size)
    for order in ("little", "big")
)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Change some bytes."""
    return random.choice(_BYTES)(data, _at(data, random), random)


def mutate_lines(text: str, random: Random, more: tuple[str, ...] = ()) -> str:
    """Change some lines, or put in a line of `more`."""
    lines = text.split("\n")
    at = random.randrange(len(lines))
    return "\n".join(random.choice(_LINES)(lines, at, random, more))


def _at(data: bytes, random: Random) -> int:
    if random.random() < 0.5:  # where headers are
        return random.randrange(min(len(data), 64) + 1)
    return random.randrange(len(data) + 1)


def _length(data: bytes, random: Random) -> int:
    return random.choice((1, 1, 2, 4, 8, 64, len(data) // 3))


def _flip(data: bytes, at: int, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _word(data: bytes, at: int, random: Random) -> bytes:
    word = random.choice(_WORDS)
    return data[:at] + word + data[at + len(word) :]


def _insert(data: bytes, at: int, random: Random) -> bytes:
    return data[:at] + random.choice((*_WORDS, random.randbytes(9), b"\0" * 4096)) + data[at:]


def _delete(data: bytes, at: int, random: Random) -> bytes:
    return data[:at] + data[at + _length(data, random) :]


def _repeat(data: bytes, at: int, random: Random) -> bytes:
    piece = data[at : at + _length(data, random)]
    return data[:at] + piece * random.choice((2, 2, 50)) + data[at:]


def _cut(data: bytes, at: int, random: Random) -> bytes:
    return data[:at]


def _append(data: bytes, at: int, random: Random) -> bytes:
    return data + random.choice((b"\0", b"\n", random.randbytes(40), data, b"\0" * 100_000))


def _blank(data: bytes, at: int, random: Random) -> bytes:
    size = min(_length(data, random), len(data) - at)
    return data[:at] + random.choice((b"\0", b"\xff", b" ", b"[")) * size + data[at + size :]


def _other(data: bytes, at: int, random: Random) -> bytes:
    return random.choice(
        (b"", b"\0", b"{}", b"[]", b"null", b"\xef\xbb\xbf", b"\xff\xfe", random.randbytes(200))
    )


_BYTES: list[Callable[[bytes, int, Random], bytes]] = [
    *[_flip] * 3,
    *[_word] * 4,
    *[_insert, _delete, _repeat, _cut, _append, _blank],
    _other,
]


def _gone(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    return lines[:at] + lines[at + 1 :]


def _again(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    return lines[:at] + [lines[at]] * random.choice((2, 2, 3, 3000)) + lines[at:]


def _moved(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    lines.insert(random.randrange(len(lines)), lines.pop(at))
    return lines


def _indented(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    lines[at] = random.choice(("  ", "\t", " ", "- ", "? ", " " * 2000)) + lines[at]
    return lines


def _word_of(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    words = lines[at].split(" ")
    words[random.randrange(len(words))] = random.choice((*TEXTS, *more, f"!!python/name:{TRIP}"))
    lines[at] = " ".join(words)
    return lines


def _line(lines: list[str], at: int, random: Random, more: tuple[str, ...]) -> list[str]:
    lines.insert(at, random.choice((*more, *TEXTS)))
    return lines


_LINES: list[Callable[[list[str], int, Random, tuple[str, ...]], list[str]]] = [
    *[_gone, _again, _moved, _indented],
    *[_word_of] * 3,
    *[_line] * 3,
]
