"""What a bucket and a Hub say that they have, right and wrong: XML of S3, JSON of the Hub's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

REPOSITORY, BUCKET = "org/name", "bucket"
LISTING = "listing"  # what it is called in rules

_HUGE = 10**18
_ENTITIES = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "]><ListBucketResult><Name>&i;</Name><Prefix>&i;</Prefix></ListBucketResult>"
)
_NAMES = (
    *("../outside", "..", ".", "/etc/passwd", "a/../../outside", "a//b", "", "\\..\\x", "x" * 5000),
    *("config.json/x", "\u202emodel", "a\nb", "con\0fig.json", "model.safetensors", "config.json "),
)
_SIZES: tuple[Any, ...] = (-1, 0, 1, _HUGE, 10**400, "x", "", None, 1.5, [], True)
# By what is wrong, with what: of names and sizes one file's, of the rest the whole answer.
SPOILT: Mapping[str, tuple[Any, ...]] = {
    "name": _NAMES,
    "size": _SIZES,
    "text": (
        *(
            "",
            "null",
            "[]",
            "{}",
            "<",
            "<a>",
            "\0" * 9,
            "x" * (1 << 22),
            "[" * 100_000,
            "<a>" * 100_000,
        ),
        *(
            _ENTITIES,
            "<Error><Code>SlowDown</Code></Error>",
            '{"error": "' + "x" * (1 << 20) + '"}',
        ),
        *('{"id": 1, "sha": null}', '{"sha": 5, "siblings": 5}', '{"siblings": [{}]}'),
    ),
    "sha": (None, "", "main", "../../outside", "F" * 40, "f" * 41, 7, ["f" * 40], "a" * 5000),
    "many": (300_000, 2000),
    "again": (True,),  # there is more, and more, and it is the same
    "left out": (None,),
}


def kinds() -> Iterator[str]:
    """Yield what a rule of listings may say, one for each way of being wrong."""
    for what, given in SPOILT.items():
        yield from (f"{what} {number}" for number in range(len(given)))


def of_bucket(folder: Path, asked: str, rule: str | None) -> bytes:
    """Answer S3's ListObjectsV2 for a folder whose files lie below its name."""
    query = parse_qs(asked)
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    what, value = _wrong(rule)
    if what == "text":
        return str(value).encode()
    entries: list[str] = []
    for name, size in _entries(folder, what, value):
        key = f"{folder.name}/{name}" if not name.startswith("/") else name
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in key[len(prefix) :]:
            inner = prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
            told = f"<CommonPrefixes><Prefix>{quote(inner)}</Prefix></CommonPrefixes>"
        else:
            etag = (
                hashlib.sha1((folder / name).read_bytes()).hexdigest()
                if _is_file(folder, name)
                else "1"
            )
            length = "" if size is None else f"<Size>{size}</Size>"
            told = f"<Contents><Key>{quote(key)}</Key><ETag>{etag}</ETag>{length}</Contents>"
        if told not in entries[-1:]:
            entries.append(told)
    if what == "again":
        entries.append("<NextContinuationToken>t</NextContinuationToken>")
    more = f"<IsTruncated>{'true' if what == 'again' else 'false'}</IsTruncated>"
    head = f"<Name>{BUCKET}</Name><Prefix>{quote(prefix)}</Prefix><EncodingType>url</EncodingType>"
    head = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{head}{more}'
    return f"{head}{''.join(entries)}</ListBucketResult>".encode()


def of_hub(folder: Path, asked: str, rule: str | None) -> bytes:
    """Answer the Hub's API for the one repository: what it is, or its tree."""
    what, value = _wrong(rule)
    if what == "text":
        return str(value).encode()
    entries = list(_entries(folder, what, value))
    if "/tree/" in asked:
        tree = [{"type": "file", "path": n, "size": s, "oid": "1"} for n, s in entries]
        return json.dumps(tree).encode()
    siblings = [{"rfilename": name, "size": size, "blobId": "1"} for name, size in entries]
    sha = value if what == "sha" else commit(folder)
    about = {"id": REPOSITORY, "sha": sha, "private": False, "tags": [], "siblings": siblings}
    return json.dumps(about).encode()


def _is_file(folder: Path, name: str) -> bool:
    return "/" not in name and "\0" not in name and len(name) < 200 and (folder / name).is_file()


def commit(folder: Path) -> str:
    """Return what a Hub calls the files as they are: its client asks for none of them twice."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha1(
        b"".join(path.name.encode() + path.read_bytes() for path in files)
    ).hexdigest()


def _wrong(rule: str | None) -> tuple[str, Any]:
    what, _, number = (rule or "").rpartition(" ")
    return (what, SPOILT[what][int(number)]) if what else ("", None)


def _entries(folder: Path, what: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Names and sizes, of which those of the last file may be wrong."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != "answers.json"
    )
    for path in files:
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if path == files[-1] and what == "left out":
            continue
        if path == files[-1]:
            name, size = value if what == "name" else name, value if what == "size" else size
        yield name, size
    if what == "many":
        yield from ((f"{n}.json", 1) for n in range(value))
