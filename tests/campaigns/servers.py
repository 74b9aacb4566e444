"""Sources and outputs on servers that lie and fail.

    python -m tests.campaigns.servers --count 50 --seed 0

The base and one expert lie on this machine, and the other expert on a server of loopback: a web server or a
Hub that lies (`pages.py`), or moto's bucket, whose requests fail and whose objects change (`buckets.py`).
Outputs go to that bucket in parts, and to a Hub whose requests fail. From a drawn request on something is
wrong, once or for good. A source that changes as a whole may be merged as it was or as it has become.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from itertools import chain, repeat
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp  # noqa: F401  # imported here, and not in each process
import fsspec.implementations.http  # noqa: F401
import pytest
import s3fs  # noqa: F401
from huggingface_hub import constants
from huggingface_hub.utils import _http
from safetensors.torch import load, save, save_file

from covmerge.files.stores import hub, link, remote, servers
from tests.campaigns import listings, pages
from tests.campaigns.buckets import CHANGES, NAME, OTHER, PASSING, REFUSED, Bucket
from tests.campaigns.disturbed import At, Ended, kill_self
from tests.campaigns.outcomes import (
    LEFT,
    RIGHT,
    WRONG,
    Kind,
    Tensors,
    Verdict,
    average,
    covmerge,
    judge,
    models,
    recipe,
)
from tests.campaigns.outcomes import (
    REFUSED as NAMED,
)
from tests.campaigns.outcomes import (
    main as campaign_of,
)
from tests.checkpoints.hub_server import REPOSITORY, WRITER, connect, serve
from tests.remote.servers import KEYS

_WEIGHTS = "model.safetensors"
KILLED = "kill -9 at a step"
_PART = 5 * 2**20  # bytes: the least that S3 takes
_ANY = pages.RULES
# What a server does wrong, in the words of `pages.py`: values by rule. All rules of a kind come together.
LIES: Mapping[str, Mapping[str, Collection[Any]]] = {
    "wrong lengths": {"length": _ANY["length"]},
    "another range than asked for": {"range": _ANY["range"]},
    "versions that change": {"etag": ("changing",)},
    "a file that changes": {"changed": ("values",)},
    "a file without versions that changes": {"etag": ("", None), "changed": ("values",)},
    "bodies cut short, too long or of a page": {
        "body": ("short", "empty", "longer", "endless", "other")
    },
    "redirects": {"location": _ANY["location"]},
    "compressed answers": {"encoding": _ANY["encoding"]},
    "chunks": {"transfer": _ANY["transfer"], "chunks": _ANY["chunks"]},
    "slow or silent": {"slow": _ANY["slow"]},
    "200 for a range": {"status": ("200 OK",)},
    "the whole file for a range": {"status": ("200 OK",), "body": ("whole",)},
    "other statuses": {"status": _ANY["status"]},
    "heads that are none": {"headers": _ANY["headers"]},
    "wrong listings": {"listing": _ANY["listing"]},
}
_OF_A_HUB = (
    *("wrong lengths", "another range than asked for", "bodies cut short, too long or of a page"),
    *("compressed answers", "200 for a range", "the whole file for a range", "other statuses"),
    *("heads that are none", "wrong listings", "a file that changes"),
)


def impatient() -> None:
    """Wait for a server as long as a campaign can, and read in small pieces."""
    link.WAITS, link.LONGEST, servers.SILENCE = (0.01,) * 2, 4.0, 0.4
    for kind in (servers._READING, servers._WRITING):
        kind["s3"]["config_kwargs"] |= {"read_timeout": 0.5, "connect_timeout": 0.5}
    servers._PIECE = _PART
    remote._SMALL = remote._WIDEST = remote._WINDOW = 1024
    hub.TIMEOUT, hub._AHEAD = 1.5, 1024
    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = 1  # type: ignore[misc]
    clock = SimpleNamespace(sleep=lambda seconds: None, time=__import__("time").time)
    _http.time = clock  # type: ignore[assignment]


def lied(store: str, rules: Mapping[str, Collection[Any]], folder: Path, random: Random) -> Verdict:
    """Merge with an expert on a server of web pages, or a Hub, that lies from a request on."""
    made = models(random)
    given = folder / pages.IN
    given.mkdir()
    save_file(made["a"], given / _WEIGHTS)
    if store == "hub":
        (given / "config.json").write_text('{"hidden_size": 16}')
    first = random.choice((0, 0, 1, 2) if store == "hub" else (0, 0, *range(1, 9)))
    name = random.choice((_WEIGHTS, "*"))
    wrong = [
        # A server that tells no versions never does.
        {"file": "*" if do == "listing" else name, "do": do, "with": random.choice(list(own))}
        | {"first": 0 if "changed" in rules and do != "changed" else first}
        for do, own in rules.items()
    ]
    told = [*(["hub"] if store == "hub" else []), *wrong, random.getrandbits(60)]
    (given / pages.ANSWERS).write_text(json.dumps(told))
    url = pages.start(folder)
    of_hub = store == "hub"

    def before() -> None:
        impatient()
        if of_hub:
            connect(pytest.MonkeyPatch(), SimpleNamespace(url=url), folder / "hub")  # type: ignore[arg-type]

    source = listings.REPOSITORY if of_hub else f"{url}/{pages.IN}/{_WEIGHTS}"
    others = [load(pages.changed((given / _WEIGHTS).read_bytes()))] if "changed" in rules else []
    verdict = _merged(folder, made, source, others, before=before)
    return verdict[0], f"{json.dumps(wrong)}\n{verdict[1]}"


@cache
def _bucket() -> Bucket:
    return Bucket()


def stored(how: str, folder: Path, random: Random) -> Verdict:
    """Merge with an expert in a bucket, of which requests fail, or which changes."""
    made, bucket = models(random), _bucket()
    other = {name: w + 0.5 for name, w in made["a"].items()}
    bucket.right()
    bucket.empty()
    for place, tensors in (("in", made["a"]), (OTHER, other)):
        bucket.put(f"{place}/{_WEIGHTS}", save(tensors))
        bucket.put(f"{place}/config.json", b'{"hidden_size": 16}')
    count = None if how in CHANGES else random.choice((1, 2, 4, 8, None))
    first = random.randrange(24)
    bucket.wrong(first, count, how)
    environment = {**KEYS, "AWS_ENDPOINT_URL": bucket.url}
    source, others = f"s3://{NAME}/in", [other] if how == CHANGES[0] else []
    verdict = _merged(folder, made, source, others, before=impatient, environment=environment)
    bucket.right()
    return verdict[0], f"from request {first} on {count} {how}\n{verdict[1]}"


def in_parts(how: str, folder: Path, random: Random) -> Verdict:
    """Merge into a bucket to which a file is sent in parts, and requests fail; then again with --resume."""
    made, bucket = models(random, width=1700, layers=1), _bucket()
    bucket.right()
    bucket.empty()
    given = {name: folder / f"{name}.safetensors" for name in made}
    for name, path in given.items():
        save_file(made[name], path)
    first, count = random.randrange(20), random.choice((1, 2, 8, None))
    environment = {**KEYS, "AWS_ENDPOINT_URL": bucket.url, "COVMERGE_CACHE": str(folder / "cache")}
    arguments = ("merge", recipe(folder, **given), f"s3://{NAME}/out")
    right, names = average(made["a"], made["b"]), (f"s3://{NAME}",)
    bucket.wrong(first, count, how)
    told = f"from request {first} on {count} {how}"
    for number, more in enumerate(((), ("--resume",))):
        ended = covmerge(folder, *arguments, *more, before=impatient, environment=environment)
        bucket.right()
        verdict = judge(ended, _copied(bucket, folder / f"out-{number}"), right, names)
        if verdict[0] != NAMED:
            break
    if verdict[0] == RIGHT and number:
        verdict = NAMED, verdict[1]
    elif number:
        verdict = WRONG, f"not done again with --resume: {verdict}"
    return verdict[0], f"{told}\n{verdict[1]}"


def _copied(bucket: Bucket, folder: Path) -> Path:
    """Copy what looks like an output out of a bucket."""
    found = bucket.contents("out")
    folder.mkdir()
    if "covmerge.json" in found:
        for name, content in found.items():
            (folder / name).write_bytes(content)
    return folder


def pushed(how: str, folder: Path, random: Random) -> Verdict:
    """Push an output to a Hub whose requests fail, or be killed; then push to it again, without faults."""
    made = models(random)
    for name, tensors in made.items():
        save_file(tensors, folder / f"{name}.safetensors")
    given = {name: folder / f"{name}.safetensors" for name in made}
    out = folder / "out"
    ended = covmerge(folder, "merge", recipe(folder, **given), out)
    verdict = judge(ended, out, average(made["a"], made["b"]), ())
    if verdict[0] != RIGHT:
        return verdict
    first, count = random.randrange(12), random.choice((1, 2, 8, 1000))
    (folder / "nothing").mkdir()
    with serve(folder / "nothing") as there:
        there.exists = random.random() < 0.5
        there.wrong = repeat("") if how == KILLED else chain(repeat("", first), repeat(how, count))
        step = At(random.randint(1, 60), kill_self) if how == KILLED else None

        def push(at: At | None = None) -> Ended:
            return covmerge(folder, "push", out, REPOSITORY, before=before, at=at)

        def before() -> None:
            impatient()
            connect(pytest.MonkeyPatch(), there, folder / "hub", WRITER)

        ended = push(step)
        there.wrong = repeat("")
        verdict = _on_hub(ended, there.files, out)
        if verdict[0] == NAMED and _on_hub(push(), there.files, out)[0] != RIGHT:
            verdict = WRONG, f"not done again\n{verdict[1]}"
    return verdict[0], f"from request {first} on {count} {how}\n{verdict[1]}"


def _on_hub(ended: Ended, there: Mapping[str, bytes], out: Path) -> Verdict:
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    if ended.code == 0:
        return (RIGHT, "") if there == files else (WRONG, f"there are {sorted(there)}")
    if ended.code == -signal.SIGKILL:
        whole = not there or there == files
        return NAMED if whole else LEFT, f"killed; there are {sorted(there)}"
    verdict = judge(ended, out / "nothing", None, (REPOSITORY,))
    lost = "or its answer was lost" in ended.said and there == files  # which is said
    if verdict[0] == NAMED and there and not lost:
        return LEFT, f"there are {sorted(there)}\n{ended.said}"
    return verdict


def _merged(
    folder: Path,
    made: Mapping[str, Tensors],
    source: str,
    others: Collection[Tensors],
    before: Callable[[], None],
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Merge with an expert that lies elsewhere; `others`: what it may also be, as a whole."""
    given = {name: folder / f"{name}.safetensors" for name in ("base", "b")}
    for name, path in given.items():
        save_file(made[name], path)
    written, out = recipe(folder, **given, a=source), folder / "out"
    ended = covmerge(folder, "merge", written, out, before=before, environment=environment)
    verdicts = [
        judge(ended, out, average(own, made["b"]), (source, "expert 'a'"))
        for own in (made["a"], *others)
    ]
    return next((own for own in verdicts if own[0] == RIGHT), verdicts[0])


KINDS: dict[str, Kind] = {
    **{f"web: {name}": partial(lied, "web", rules) for name, rules in LIES.items()},
    **{f"Hub: {name}": partial(lied, "hub", LIES[name]) for name in _OF_A_HUB},
    **{f"bucket: {how}": partial(stored, how) for how in (*PASSING, *REFUSED, *CHANGES)},
    **{f"in parts to a bucket: {how}": partial(in_parts, how) for how in PASSING},
    **{f"push: {how}": partial(pushed, how) for how in (*PASSING, *REFUSED, KILLED)},
}
del KINDS["web: wrong listings"]  # a web server has none

main = partial(campaign_of, __doc__, KINDS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
