"""How many requests are under way at once: what a link carries, and no more than a server likes."""

import asyncio
import itertools
import random
import selectors
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.files.stores import link
from covmerge.files.stores.address import address_of
from covmerge.files.stores.link import Link, link_to
from covmerge.files.stores.remote import RemoteStore, server_at
from covmerge.files.stores.store import StoredFile
from tests.remote.servers import Narrow, cut, files, serving

PART = 2**16


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 64 KiB, so that small files have many."""
    monkeypatch.setattr(link, "_SHORTEST", PART)
    monkeypatch.setattr(link, "_LONGEST", PART)
    monkeypatch.setattr(link, "_HELD", PART)


class Hurried(selectors.SelectSelector):
    """Waits no time, and counts what it would have waited, `now` seconds."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is due, and nothing is ever going to be"
        self.now += timeout
        return super().select(0)


class HurriedLoop(asyncio.SelectorEventLoop):
    """A loop of events in which time passes only where nothing else is to be done."""

    def __init__(self, selector: Hurried) -> None:
        super().__init__(selector)
        self._hurried = selector

    def time(self) -> float:
        return self._hurried.now


def rate(store: RemoteStore, content: bytes) -> float:
    """Bytes a second of a file, or its beginning, that is read at once."""
    began = time.monotonic()
    target = memoryview(bytearray(len(content)))
    with StoredFile(store, "m.bin").open() as opened:
        assert opened.read_at(target, 0) == len(content)
    assert target == content
    return len(content) / (time.monotonic() - began)


def long_file(folder: Path, parts: int) -> bytes:
    content = random.randbytes(parts * PART - 7)
    (folder / "m.bin").write_bytes(content)
    return content


def opened(url: str) -> RemoteStore:
    address = address_of(url)
    assert address is not None
    return RemoteStore(*server_at(address))


def test_connections_that_are_slow_each_become_more(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = long_file(tmp_path, 256)
    narrow = Narrow(latency=0.02, each=3e5)
    with serving(narrow.app(files(tmp_path))) as server:
        for _ in range(3):  # a busy machine is slow for a while itself, and measures that
            narrow.peak = 0
            link_to.cache_clear()
            parallel = rate(opened(server.url), content)
            if link_to(server.url).at_once == link.MOST:
                break
        assert link_to(server.url).at_once == link.MOST == narrow.peak
        link_to.cache_clear()
        monkeypatch.setattr(link, "_FIRST", 1)
        monkeypatch.setattr(link, "MOST", 1)
        narrow.peak = 0
        alone = rate(opened(server.url), content[: 10 * PART])
        assert narrow.peak == 1
    assert parallel > 6 * alone


def test_a_link_that_is_full_is_not_filled_further() -> None:
    """By a clock of its own: on a machine that is busy, real requests become faster by themselves."""
    selector = Hurried()
    found, under_way, peak, free = Link(lambda: selector.now), 0, 0, 0.0

    async def request() -> None:
        """Bring a part: 10 ms until it begins, 500 kB a second each, 2.5 MB a second all together."""
        nonlocal under_way, peak, free
        under_way += 1
        peak = max(peak, under_way)
        await asyncio.sleep(0.01)
        free = max(free, selector.now) + PART / 2.5e6
        await asyncio.sleep(max(free - selector.now, PART / 5e5))
        under_way -= 1

    async def part() -> None:
        async with found.turn():
            await found.attempt(request, PART)

    async def read() -> None:
        await asyncio.gather(*(part() for _ in range(120)))

    with closing(HurriedLoop(selector)) as loop:
        loop.run_until_complete(read())
    assert found.at_once == 8 and peak == 16


def test_a_server_that_refuses_is_not_pressed(tmp_path: Path, small: None) -> None:
    """The first eight are too many, and then no more than four come at once for half a minute."""
    content = long_file(tmp_path, 160)
    narrow = Narrow(latency=0.005, each=5e6, most=4)
    with serving(narrow.app(files(tmp_path))) as server:
        rate(opened(server.url), content)
        assert link_to(server.url).at_once == 4
        assert narrow.refused <= 12 and narrow.peak == 4
        asked = sum(path == "/m.bin" for _, path, _ in server.requests)
        assert asked <= 160 + 1 + narrow.refused


def test_the_sources_of_an_item_are_read_at_once(tmp_path: Path) -> None:
    """Of one source there are no more than five requests to make."""
    names = ("base", "a", "b", "c")
    for name in names:
        save_file({"h.0.w": torch.randn(1100, 1024)}, tmp_path / f"{name}.safetensors")
    narrow = Narrow(latency=0.05)
    with serving(narrow.app(files(tmp_path))) as server:
        base, *experts = (f"{server.url}/{name}.safetensors" for name in names)
        merged = covmerge.merge(base, dict(zip(names[1:], experts, strict=True)), "average")
    # Eight and more, as the link has it; one source after the other they come to five.
    assert narrow.peak > 5
    here = (load_file(tmp_path / f"{name}.safetensors")["h.0.w"] for name in names[1:])
    torch.testing.assert_close(merged.tensors["h.0.w"], sum(here) / 3)


def test_one_lost_connection_is_no_reason_and_two_are(tmp_path: Path, small: None) -> None:
    content = long_file(tmp_path, 10)
    with serving(files(tmp_path)) as server:
        for times, at_once in ((1, 8), (2, 4)):
            link_to.cache_clear()
            store = opened(server.url)
            store.is_file("m.bin")  # asked for before anything fails
            server.fail("m.bin", cut, times)
            rate(store, content)
            assert link_to(server.url).at_once == at_once


def test_more_are_tried_again_later_and_ever_less_often() -> None:
    now = 0.0
    found = Link(lambda: now)

    async def request() -> None:
        """Bring a part over a link that takes a second for each, however many are under way."""
        nonlocal now
        await asyncio.sleep(0)
        now += 1.0

    async def read(parts: int) -> list[int]:
        seen = []

        async def part() -> None:
            async with found.turn():
                await found.attempt(request, 10)
            seen.append(found.at_once)

        await asyncio.gather(*(part() for _ in range(parts)))
        return seen

    seen = asyncio.run(read(2000))
    changes = [n for n, (a, b) in enumerate(itertools.pairwise(seen)) if a < b]
    gaps = [b - a for a, b in itertools.pairwise(changes)]
    assert set(seen) == {8, 16} and seen.count(8) > seen.count(16)
    assert len(gaps) >= 4 and gaps == sorted(gaps) and gaps[-1] > 400


def test_parts_are_smaller_where_there_are_more() -> None:
    found = Link()
    for at_once in (1, 4, 8, 16, 32):
        found.at_once = at_once
        assert at_once * found.part(2**40) <= link._HELD
        assert found.part(2**40) % 2**20 == 0
    assert found.part(1) == 2**20
    found.at_once = 8
    assert found.part(2**24) == 2**21  # a tensor of 16 MiB goes by eight requests too
