"""One change to a file, by what its format says: its numbers, names, sizes, members and steps."""

from __future__ import annotations

import io
import json
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random

from tests.campaigns import pages
from tests.campaigns.raw import mutate_bytes, mutate_lines
from tests.campaigns.trees import (
    NUMBERS,
    OUTSIDE,
    TEXTS,
    TRIP,
    Pairs,
    edge,
    from_plain,
    mutate,
    parse,
    write,
)

Change = Callable[[bytes, Random], bytes]

_DTYPES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"), 1),
}


def change(name: str, data: bytes, random: Random) -> bytes:
    """Return a file with one change, which its format is likely to survive for a while."""
    if random.random() < 0.12:
        return mutate_bytes(data, random)
    try:
        return _kind(name, data)(data, random)
    except _STRANGE:  # an earlier change has left nothing of the format
        return mutate_bytes(data, random)


_STRANGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_STRANGE += (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError)


def _kind(name: str, data: bytes) -> Change:
    if name.endswith(".safetensors"):
        return _safetensors
    if name.endswith(".jsonl"):
        return _journal
    if name.endswith(pages.ANSWERS):
        return pages.draw
    if name.endswith(".json"):
        return _json
    if name.endswith((".yml", ".yaml")):
        return _yaml
    if name.endswith(".gguf"):
        return _gguf
    if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        return _zip if data[:2] == b"PK" else _pickle
    return _text


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(data: bytes, random: Random) -> bytes:
    return _encoded(write(mutate(parse(data.decode("utf-8", "surrogatepass")), random), random))


def _text(data: bytes, random: Random) -> bytes:
    return _encoded(mutate_lines(data.decode("utf-8", "surrogatepass"), random, _YAML_LINES))


def _safetensors(data: bytes, random: Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = random.random()
    if kind < 0.1:
        other = random.choice(
            (0, 1, 2, length - 1, length + 1, length + 8, len(data), 10**8, 2**63, 2**64 - 1)
        )
        return struct.pack("<Q", other) + data[8:]
    if kind < 0.5:
        told = _json(header, random)
        return struct.pack("<Q", len(told)) + told + body
    return _tensors(parse(header.decode()), body, random)


def _tensors(tree: Pairs, body: bytes, random: Random) -> bytes:
    """One tensor changed, all sizes and offsets brought into order again: what later stages meet."""
    stored = [
        [name, told["dtype"], told["shape"], body[slice(*told["data_offsets"])]]
        for name, pairs in tree
        if name != "__metadata__"
        for told in [dict(pairs)]
    ]
    one = random.choice(stored)
    match random.randrange(8):
        case 0:
            one[0] = (
                edge(random, one[0])
                if random.random() < 0.6
                else random.choice(stored)[0] + random.choice("ab0.")
            )
            one[0] = one[0] if isinstance(one[0], str) else str(one[0])
        case 1:
            stored.remove(one)
        case 2:
            stored.append(
                [one[0] + random.choice((".weight", ".bias", "_scale", "x", ".0")), *one[1:]]
            )
        case 3:
            one[1] = random.choice(list(_DTYPES))
        case 4:
            one[2] = _shape(one[2], random)
        case 5:
            one[2] = random.choice(
                (one[2][::-1], [math.prod(one[2])], [*one[2], 1], [1, *one[2]], one[2][1:])
            )
        case 6:
            size = _DTYPES.get(one[1], 1)
            pattern = random.choice(
                (b"\xff", b"\0", b"\x7f", b"\x80", b"\x00\x00\x80\x7f", b"\x00\x7c")
            )
            one[3] = (pattern * (len(one[3]) + size))[: len(one[3])]
        case _:
            one[3] = random.randbytes(len(one[3]))
    metadata = [[key, value] for key, value in tree if key == "__metadata__"]
    told, end, values = Pairs(metadata), 0, b""
    for name, dtype, shape, content in stored:
        size = math.prod(shape) * _DTYPES.get(dtype, 1)
        if size > 1 << 22:
            size = len(content)
        content = (content * (size // len(content) + 1))[:size] if content else b"\0" * size
        told.append(
            [name, from_plain({"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]})]
        )
        end += size
        values += content
    header = _encoded(write(told))
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + values


def resized(data: bytes, size: int, random: Random) -> bytes:
    """The header of a large file, of the same length, in which a tensor has other sides or bits."""
    try:
        return _resized(data, size, random)
    except _STRANGE:
        return mutate_bytes(data, random)


def _resized(data: bytes, size: int, random: Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    tree = json.loads(data[8 : 8 + length])
    one = tree[max(tree, key=lambda name: tree[name].get("data_offsets", [0])[-1])]
    count = math.prod(one["shape"])
    match random.randrange(4):
        case 0:
            one["shape"] = [count // 2, 2]
        case 1:
            one["shape"] = random.choice(
                ([count], [1, count], [count, 1], [count, 0], [2**40, 2**40])
            )
        case 2:
            one["dtype"] = random.choice(("F64", "F16", "I32", "BF16", "F8_E4M3", "BOOL"))
            one["shape"][-1] = one["shape"][-1] * 4 // _DTYPES[one["dtype"]]
        case _:
            shift = random.choice((-4, 4, size))
            one["data_offsets"] = [place + shift for place in one["data_offsets"]]
    told = json.dumps(tree).encode()
    return struct.pack("<Q", max(length, len(told))) + told.ljust(length) + data[8 + length :]


def _shape(shape: list[int], random: Random) -> list[int]:
    changed = list(shape) or [1]
    at = random.randrange(len(changed))
    changed[at] = random.choice(
        (0, 1, 2, changed[at] + 1, max(0, changed[at] - 1), changed[at] * 2, 33)
    )
    return changed


# Metadata's numbers of GGUF, by kind.
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf(data: bytes, random: Random) -> bytes:
    start, size, kind = random.choice(_gguf_fields(data))
    if kind == "text":
        text = edge(random, data[start + 8 : start + 8 + size].decode("utf-8", "replace"))
        told = _encoded(str(text))
        return data[:start] + struct.pack("<Q", len(told)) + told + data[start + 8 + size :]
    (own,) = struct.unpack_from({1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[size], data, start)
    value = random.choice(
        (0, 1, own + 1, own - 1, own * 2, own + 32, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 8, 9)
    )
    if size == 4 and random.random() < 0.5:
        value = random.randrange(40)  # a type
    return data[:start] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[start + size :]


def _gguf_fields(data: bytes) -> list[tuple[int, int, str]]:
    """Places, sizes and kinds of the header's fields."""
    found = [(0, 4, "n"), (4, 4, "n"), (8, 8, "n"), (16, 8, "n")]
    place = 24

    def number(size: int) -> int:
        nonlocal place
        found.append((place, size, "n"))
        place += size
        return int.from_bytes(data[place - size : place], "little")

    def text() -> None:
        nonlocal place
        start, size = place, int.from_bytes(data[place : place + 8], "little")
        found.extend([(start, 8, "n"), (start, size, "text")])
        place += 8 + size

    tensors, entries = struct.unpack_from("<QQ", data, 8)
    for _ in range(min(entries, 200)):
        text()
        kind = number(4)
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = number(4), number(8)
            for _ in range(min(count, 100)):
                text() if inner == 8 else number(_GGUF_SIZES[inner])
        else:
            number(_GGUF_SIZES[kind])
    for _ in range(min(tensors, 200)):
        text()
        for _ in range(min(number(4), 8)):
            number(8)
        number(4)
        number(8)
    return [(start, size, kind) for start, size, kind in found if start + 8 <= len(data)]


def _zip(data: bytes, random: Random) -> bytes:
    """The members of an archive, one of them changed, or how they are kept."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [
            [entry.filename, archive.read(entry), zipfile.ZIP_STORED]
            for entry in archive.infolist()
        ]
    one = random.choice(members)
    pickled = [member for member in members if member[0].endswith(".pkl")]
    kind = random.random()
    if kind < 0.6 and pickled:
        pickled[0][1] = _pickle(pickled[0][1], random)
    elif kind < 0.65:
        one[1] = mutate_bytes(one[1], random)
    elif kind < 0.7:
        text = str(edge(random, one[0])).replace("\0", "0")[:60_000] or "x"
        one[0] = text.encode("utf-8", "replace").decode()
    elif kind < 0.75:
        members.remove(one)
    elif kind < 0.8:
        members.append([one[0], mutate_bytes(one[1], random), zipfile.ZIP_STORED])
    elif kind < 0.85:
        one[2] = zipfile.ZIP_DEFLATED
        one[1] += b"\0" * random.choice((0, 1 << 20))
    elif kind < 0.9:
        members.append(
            [
                random.choice(
                    ("archive/constants.pkl", "x/data.pkl", "archive/code/a.py", f"{OUTSIDE}/x")
                ),
                b"",
                0,
            ]
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content, compression in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            archive.writestr(info, content)
    made = packed.getvalue()
    if kind < 0.9:
        return made
    # A number of the local headers or of the central directory.
    places = [
        n for sign in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06") for n in _found(made, sign)
    ]
    at = random.choice(places) + random.randrange(4, 46)
    return (
        made[:at]
        + random.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01", b"\xff\xff"))
        + made[at + 2 :]
    )


def _found(data: bytes, sign: bytes) -> list[int]:
    places, at = [], data.find(sign)
    while at >= 0:
        places.append(at)
        at = data.find(sign, at + 1)
    return places


_CALLS = (
    f"cposix\nmkdir\n(X{{length}}{TRIP}tR",
    f"cbuiltins\neval\n(X{{length}}__import__('os').mkdir('{TRIP}')tR",
    f"cos\nsystem\n(X{{length}}mkdir {TRIP}tR",
    f"ctorch.hub\nload\n(X{{length}}{TRIP}tR",
    f"cnumpy.core.multiarray\n_reconstruct\n(X{{length}}{TRIP}tR",
    f"cpathlib\nPosixPath\n(X{{length}}{TRIP}tR",
)
_STEPS = (
    *(
        b"K\xff",
        b"J\xff\xff\xff\x7f",
        b"J\xff\xff\xff\xff",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"\x8a\xff" + b"\x7f" * 255,
    ),
    *(
        b"I1\n",
        b"L9" + b"9" * 5000 + b"\n",
        b"F1e999\n",
        b"G\x7f\xf0" + b"\0" * 6,
        b"N",
        b"\x88",
        b"\x89",
        b"]",
        b"}",
        b")",
    ),
    *(
        b"r\xff\xff\xff\x7f",
        b"j\xff\xff\xff\x7f",
        b"q\xff",
        b"h\xfe",
        b"\x94",
        b"p99999999999\n",
        b"g-1\n",
    ),
    *(
        b"X\xff\xff\xff\x7f",
        b"\x8d" + b"\xff" * 7 + b"\x7f",
        b"\x8e" + b"\xff" * 7 + b"\x7f",
        b"B\xff\xff\xff\x7f",
    ),
    *(
        b"\x95" + b"\xff" * 7 + b"\x7f",
        b"\x80\x63",
        b"\x80\x05",
        b"\x82\x01",
        b"P1\n",
        b"Q",
        b"b",
        b"R",
        b"o",
        b"\x81",
        b"\x92",
    ),
    *(
        b"\x93",
        b"\x85",
        b"\x86",
        b"\x87",
        b"(",
        b"t",
        b"0",
        b"1",
        b"2",
        b"a",
        b"e",
        b"s",
        b"u",
        b"d",
        b"l",
        b".",
        b"\x90",
        b"\x91",
    ),
    *(
        b"ccollections\nOrderedDict\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"c__builtin__\nset\n",
        b"\x97",
        b"\x98",
    ),
    *(
        b"X\x01\x00\x00\x00a",
        b"X\x00\x00\x00\x00",
        b"\x8c\x03\xed\xa0\x80",
        b"C\x04abcd",
        b"U\x02ab",
        b"S'a'\n",
        b"V\\ud800\n",
    ),
)


def _pickle(data: bytes, random: Random) -> bytes:
    """One step left out, doubled, moved, replaced or put in, or a number or name in one changed."""
    places: list[int] = []
    base = 0
    while base < len(data) and len(places) < 4000:
        try:
            for _, _, at in pickletools.genops(data[base:]):
                places.append(base + (at or 0))
        except ValueError:
            break
        base = places[-1] + 1  # old files have several, one after the other
    bounds = [*places, base]
    at = random.randrange(len(places))
    start, end = bounds[at], bounds[at + 1]
    step = data[start:end]
    match random.randrange(8):
        case 0:
            new = b""
        case 1:
            new = step * random.choice((2, 2, 1000))
        case 2:
            other = random.randrange(len(places))
            new = data[bounds[other] : bounds[other + 1]]
        case 3 | 4:
            new = random.choice(_STEPS)
        case 5:
            new = step + random.choice(_STEPS)
        case 6:
            head, _, text = random.choice(_CALLS).partition("{length}")
            argument = text[:-2].encode()
            call = head.encode() + struct.pack("<I", len(argument)) + argument + b"tR"
            new = random.choice((call, call + b"0" + step, step + call + b"0"))
        case _:
            new = step[:1] + mutate_bytes(step[1:], random)
    return data[:start] + new + data[end:]


_YAML_LINES = (
    f"x: !!python/object/apply:os.mkdir ['{TRIP}']",
    f"!!python/object/new:os.system [mkdir {TRIP}]",
    *(
        "a: &a [*a]",
        "b: &b {x: *b}",
        "<<: *a",
        "<<: {method: ties}",
        "---",
        "...",
        "--- !x",
        "%YAML 9.9",
        "%TAG ! x:",
    ),
    *(
        "? [a, b]\n: c",
        "? {a: b}\n: 1",
        "'",
        '"',
        '"\\ud800"',
        '"\\x1b[2J"',
        '"\\u0000"',
        "\t- x",
        "x:\t1",
        "- - - - -",
    ),
    *(
        "k: " + "[" * 3000,
        "k: " + "[" * 40 + "]" * 40,
        "{" * 500,
        "- " * 2000,
        "k: |+\n\n\n x",
        "k: >2-\n x",
        "k: !!binary x",
    ),
    *(
        "k: !!set {a}",
        "k: !!float x",
        "k: !!int 99",
        "k: 1:30:00",
        "k: 0o9",
        "k: 1_000",
        "k: 2001-12-14",
        "k: =",
        "k: <<",
    ),
    *(
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
        "license: [apache-2.0, mit]",
        "license: {a: b}",
        "key: " + "9" * 5000,
    ),
    "\n".join(f"k{n}: &a{n} x\nl{n}: *a{n}" for n in range(300)),
)


def _yaml(data: bytes, random: Random) -> bytes:
    text = data.decode("utf-8", "surrogatepass")
    if text.lstrip().startswith("{") and random.random() < 0.8:
        return _json(data, random)
    return _encoded(mutate_lines(text, random, _YAML_LINES))


def _journal(data: bytes, random: Random) -> bytes:
    """A line as JSON, mostly under a checksum that is right."""
    lines = data.split(b"\n")
    if random.random() < 0.3:
        return _text(data, random)
    at = random.randrange(len(lines))
    record = json.loads(lines[at])
    record.pop("crc", None)
    told = _encoded(write(mutate(from_plain(record), random), random))
    if random.random() < 0.8:
        told = told[:-1] + f',"crc":"{zlib.crc32(told):08x}"}}'.encode()
    lines[at] = told
    return b"\n".join(lines)


__all__ = ["NUMBERS", "TEXTS", "change"]
