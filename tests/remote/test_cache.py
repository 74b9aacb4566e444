"""What is read of other machines and kept here: read once, within its bound, never what has changed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge import open_checkpoint
from covmerge.errors import InputError
from covmerge.files.stores import range_cache
from covmerge.files.stores.address import Address
from covmerge.files.stores.range_cache import RangeCache
from covmerge.files.stores.remote import remote_store
from covmerge.files.stores.store import StoredFile
from tests.remote.conftest import Bucket
from tests.remote.servers import Server, files, serving

NAMES = ("base", "a", "b")
BLOCK = 2**10


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a cache of 1 GB."""
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COVMERGE_REMOTE_CACHE", "1GB")
    return tmp_path / "cache" / "ranges"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RangeCache:
    """A cache of four sets of four blocks."""
    monkeypatch.setattr(range_cache, "BLOCK", BLOCK)
    monkeypatch.setattr(range_cache, "_SETS", 4)
    return RangeCache(tmp_path / "ranges", 4 * 4 * (BLOCK + range_cache._CHECKSUM))


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in kept(folder))


def read(store, name: str) -> bytes:
    return StoredFile(store, name).read(2**30)


def moved(server: Server) -> int:
    """Bytes of the ranges that a server was asked for."""
    ranges = [asked.removeprefix("bytes=").split("-") for *_, asked in server.requests if asked]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


@pytest.fixture
def sources(bucket: Bucket, tmp_path: Path) -> tuple[dict[str, str], int]:
    """A base and two experts in a bucket, of matrices that no window holds, and their bytes."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in NAMES:
        weights = {f"h.{n}.w": torch.randn(1100, 1024, generator=generator) for n in range(3)}
        save_file(weights, tmp_path / f"{name}.safetensors")
        found[name] = bucket.put(tmp_path / f"{name}.safetensors", f"{name}.safetensors")
    return found, sum((tmp_path / f"{name}.safetensors").stat().st_size for name in NAMES)


def ties(sources: dict[str, str], out: Path) -> bytes:
    base, *experts = sources.values()
    covmerge.merge(base, dict(zip(NAMES[1:], experts, strict=True)), "ties", out)
    return (out / "model.safetensors").read_bytes()


def test_ties_reads_every_byte_once(
    bucket: Bucket, sources, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, total = sources
    bucket.server.requests.clear()
    with_cache = ties(addresses, tmp_path / "one")
    once = moved(bucket.server) / total
    bucket.server.requests.clear()
    again = ties(addresses, tmp_path / "again")
    resumed = moved(bucket.server) / total
    bucket.server.requests.clear()
    monkeypatch.setenv("COVMERGE_REMOTE_CACHE", "0")
    without = ties(addresses, tmp_path / "two")
    twice = moved(bucket.server) / total
    assert with_cache == again == without
    assert 1.0 <= once < 1.15 and twice > 1.9 and resumed < 0.01
    assert total <= size(cache) < 1.01 * total
    assert cache.stat().st_mode & 0o077 == 0


def test_the_bound_is_held_and_what_is_used_stays(small: RangeCache, tmp_path: Path) -> None:
    bound = 4 * 4 * (BLOCK + range_cache._CHECKSUM)
    first = small.file("first", size=4 * BLOCK)
    content = random.randbytes(4 * BLOCK)
    first.keep(memoryview(content), 0)
    for number in range(50):
        time.sleep(0.001)  # the clock of the files
        target = bytearray(len(content))
        assert first.fill(memoryview(target), 0) == [] and target == content
        small.file(f"{number}", size=BLOCK * 3).keep(memoryview(random.randbytes(3 * BLOCK)), 0)
        assert size(tmp_path / "ranges") <= bound
    assert size(tmp_path / "ranges") == bound
    assert small.file("0", size=BLOCK * 3).fill(memoryview(bytearray(BLOCK)), BLOCK) != []


def test_what_others_put_there_is_neither_removed_nor_believed(
    small: RangeCache, tmp_path: Path
) -> None:
    ranges, elsewhere = tmp_path / "ranges", tmp_path / "elsewhere"
    elsewhere.mkdir()
    content = memoryview(random.randbytes(4 * BLOCK))
    small.file("x", size=len(content)).keep(content, 0)
    for name in ("0" * 64 + "-1", "thesis.txt"):
        (elsewhere / name).write_bytes(bytes(9 * BLOCK))
    (ranges / "00" / "thesis.txt").write_bytes(bytes(9 * BLOCK))
    for number in range(8):
        small.file(f"{number}", size=len(content)).keep(content, 0)
    assert (ranges / "00" / "thesis.txt").exists()

    shutil.rmtree(ranges / "01")
    (ranges / "01").symlink_to(elsewhere)
    with pytest.warns(
        UserWarning, match=r"01 is a link. Where .*ranges is not as covmerge made it"
    ):
        small.file("y", size=len(content)).keep(content, 0)
    assert len(list(elsewhere.iterdir())) == 2

    ranges.chmod(0o777)
    again = RangeCache(ranges, 2**20)
    target = memoryview(bytearray(len(content)))
    assert again.file("x", size=len(content)).fill(target, 0) == [range(len(content))]
    with pytest.warns(UserWarning, match="others may write to .*ranges: remove it, or `chmod 700`"):
        again.file("x", size=len(content)).keep(content, 0)


def test_only_what_is_not_kept_is_missing(small: RangeCache) -> None:
    content = random.randbytes(5 * BLOCK + 100)
    file = small.file("x", size=len(content))
    file.keep(memoryview(content)[2 * BLOCK : 3 * BLOCK], 2 * BLOCK)
    target = bytearray(4 * BLOCK)
    missing = file.fill(memoryview(target), BLOCK + 7)
    assert missing == [range(BLOCK, 2 * BLOCK), range(3 * BLOCK, len(content))]
    file.keep(memoryview(content)[3 * BLOCK :], 3 * BLOCK)
    assert file.fill(memoryview(target), BLOCK + 7) == [range(BLOCK, 2 * BLOCK)]
    assert target[BLOCK:] == content[2 * BLOCK + 7 : 5 * BLOCK + 7]


CHILD = f"""
import os, random, sys
from pathlib import Path
from covmerge.files.stores import range_cache
range_cache.BLOCK, range_cache._SETS = {BLOCK}, 4
cache = range_cache.RangeCache(Path(sys.argv[1]), 4 * 4 * ({BLOCK} + range_cache._CHECKSUM))
"""
BOTH = f"""{CHILD}
found = 0
for number in range(2000):
    of = random.randrange(20)
    file, content = cache.file(f"{{of}}", size={BLOCK}), random.Random(of).randbytes({BLOCK})
    target = bytearray({BLOCK})
    if file.fill(memoryview(target), 0):
        file.keep(memoryview(content), 0)
    else:
        found += 1
        assert target == content
print(found)
"""


def python(code: str, *given: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "ranges"
    running = [python(BOTH, folder) for _ in range(2)]
    most = 0
    while any(process.poll() is None for process in running):
        try:
            most = max(most, size(folder))
        except FileNotFoundError:  # it went while it was looked at
            continue
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert int(out) > 200
    assert most <= (4 * 4 + 2) * (BLOCK + range_cache._CHECKSUM)  # and what both are writing
    assert not any("unfinished" in path.name for path in kept(folder))


def test_a_kill_in_a_write_leaves_nothing_that_looks_finished(small, tmp_path: Path) -> None:
    folder = tmp_path / "ranges"
    killed = f"""{CHILD}
Path.replace = lambda *_: os.kill(os.getpid(), 9)  # all is written, and nothing has its name
cache.file("x", size={BLOCK}).keep(memoryview(bytes({BLOCK})), 0)
"""
    process = python(killed, folder)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = kept(folder)
    assert "unfinished" in left.name
    file = small.file("x", size=BLOCK)
    assert file.fill(memoryview(bytearray(BLOCK)), 0) == [range(BLOCK)]
    for age in (0, 2 * range_cache._ABANDONED):
        os.utime(left, (time.time() - age,) * 2)
        for number in range(5):
            small.file(f"{number}", size=4 * BLOCK).keep(memoryview(bytes(4 * BLOCK)), 0)
        assert left.exists() == (age == 0)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.05])
def test_a_kill_at_any_moment(small, tmp_path: Path, delay: float) -> None:
    folder = tmp_path / "ranges"
    endless = f"""{CHILD}
print("begun", flush=True)
while True:
    of = random.randrange(12)
    content = random.Random(of).randbytes({BLOCK})
    cache.file(f"{{of}}", size={BLOCK}).keep(memoryview(content), 0)
"""
    process = python(endless, folder)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(delay)
    process.kill()
    process.communicate()
    for of in range(12):
        target = bytearray(BLOCK)
        if not small.file(f"{of}", size=BLOCK).fill(memoryview(target), 0):
            assert target == random.Random(of).randbytes(BLOCK)


def test_a_changed_object_is_read_anew(
    bucket: Bucket, models, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (_, experts) = f"{bucket.name}/m.safetensors", models
    contents = [experts[expert].read_bytes() for expert in ("e0", "e1", "e0")]
    assert len(contents[0]) == len(contents[1])
    for number, content in enumerate(contents):
        bucket.system.pipe_file(name, content)
        bucket.server.requests.clear()
        store = remote_store(Address("s3", bucket.name))
        assert read(store, "m.safetensors") == content
        assert (moved(bucket.server) > 0) == (number < 2)  # the third is the first
    opened = StoredFile(store, "m.safetensors").open()
    bucket.system.pipe_file(name, contents[1][:-1] + b"x")
    range_cache._cache.cache_clear()
    for path in kept(cache):
        path.unlink()
    store._windows._held.clear()
    with pytest.raises(OSError, match="changed while it was in use"):
        opened.read_at(memoryview(bytearray(100)), 0)
    assert kept(cache) == []


def test_damaged_blocks_are_read_again(bucket: Bucket, models, cache: Path) -> None:
    def flip(content: bytes) -> bytes:
        return content[:100] + bytes([content[100] ^ 1]) + content[101:]

    content = random.randbytes(3 * 2**20 + 5)
    bucket.system.pipe_file(f"{bucket.name}/folder/long", content)
    address = Address("s3", f"{bucket.name}/folder")
    assert read(remote_store(address), "long") == content
    right = {path: path.read_bytes() for path in kept(cache)}
    one, two, *_ = right
    for damage in (flip, lambda c: c[:-1], lambda c: c + b"x", lambda _: b"", lambda _: right[two]):
        one.write_bytes(damage(right[one]))
        bucket.server.requests.clear()
        assert read(remote_store(address), "long") == content
        assert 0 < moved(bucket.server) <= 2**20
        assert {path: path.read_bytes() for path in kept(cache)} == right
    one.unlink()
    one.mkdir()
    with pytest.warns(UserWarning, match="nothing more of what is read of other machines is kept"):
        assert read(remote_store(address), "long") == content
    range_cache._cache.cache_clear()


def test_a_cache_that_cannot_be_written_ends_nothing(
    bucket: Bucket, models, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models[1]["e0"]
    address = bucket.put(path, "m.safetensors")
    monkeypatch.setattr(range_cache, "_SPARED", 2**62)
    with pytest.warns(UserWarning, match=r"kept \(COVMERGE_REMOTE_CACHE\): less than \d+ bytes"):
        checkpoint = open_checkpoint(address)
    assert all(torch.equal(checkpoint.read(n), value) for n, value in load_file(path).items())
    assert kept(cache) == []
    monkeypatch.setenv("COVMERGE_CACHE", str(path))
    with pytest.warns(UserWarning, match=r"kept \(COVMERGE_REMOTE_CACHE\): cannot write"):
        open_checkpoint(address)


@pytest.mark.parametrize(
    "said, message",
    [
        ("many", "COVMERGE_REMOTE_CACHE: 'many' is not a size"),
        ("5GBit", "unknown unit"),
        ("5MB", "COVMERGE_REMOTE_CACHE is '5MB': give at least 1GB, or 0 for no cache"),
    ],
)
def test_what_is_no_bound(bucket: Bucket, cache, monkeypatch, said: str, message: str) -> None:
    monkeypatch.setenv("COVMERGE_REMOTE_CACHE", said)
    with pytest.raises(InputError, match=message):
        open_checkpoint(f"{bucket.url}/m.safetensors")


def test_no_place_for_it(bucket: Bucket, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COVMERGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InputError, match="no folder for what is kept: set COVMERGE_CACHE"):
        open_checkpoint(f"{bucket.url}/m.safetensors")


@pytest.mark.parametrize(
    "told, lasting",
    [
        ({"ETag": '"1"'}, True),
        ({"ETag": 'W/"1"'}, False),
        ({}, False),
        ({"Last-Modified": formatdate(0, usegmt=True)}, True),
        ({"Last-Modified": "now", "ETag": '"now"'}, False),
        ({"Last-Modified": "yesterday"}, False),
    ],
)
def test_what_could_change_unseen_is_not_kept(
    tmp_path: Path, models, cache: Path, told: dict[str, str], lasting: bool
) -> None:
    """Times count seconds: what was changed just now may change once more, and say the same."""
    told = {k: v if v != "now" else formatdate(usegmt=True) for k, v in told.items()}
    (tmp_path / "pages").mkdir()
    path = tmp_path / "pages" / "m.safetensors"
    path.write_bytes(models[1]["e0"].read_bytes())
    with serving(files(path.parent, headers=told)) as server:
        open_checkpoint(f"{server.url}/m.safetensors")
    assert bool(kept(cache)) == lasting
