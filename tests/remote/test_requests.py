"""Answers of servers that no honest one gives, and what is told of them."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from covmerge.base.code import user_cache
from covmerge.errors import CheckpointError, InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores import hub, remote, servers
from covmerge.files.stores.address import Address
from covmerge.files.stores.hub import HubStore
from covmerge.files.stores.hub_cache import is_commit
from covmerge.files.stores.link import ChangedError, RefusedError, link_to, persist
from covmerge.files.stores.remote import RemoteStore, remote_store
from covmerge.files.stores.servers import FileStat
from tests.advised import advice
from tests.checkpoints.hub_server import connect, serve


def downloaded(folder: Path) -> None:
    """What messages advise: the folder of a download is read."""
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    assert list(open_checkpoint(folder).headers) == ["w"]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HttpError(Exception):
    """As gcsfs names what its server answers."""

    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    "error, told, said",
    [
        (FileExistsError(17, "in passing"), FileExistsError, "File exists"),
        (HttpError(412), ChangedError, "changed while it was in use"),
        (HttpError(418), RefusedError, "refuses it .status 418"),
        (HttpError(404), FileNotFoundError, "No such file"),
    ],
)
def test_what_no_further_attempt_mends(error, told, said: str) -> None:
    asked = []

    async def request() -> None:
        asked.append(1)
        raise error

    with pytest.raises(told, match=said):
        asyncio.run(persist(request))
    assert len(asked) == 1


def test_a_listing_without_lengths_is_refused(monkeypatch) -> None:
    for size in (None, -1, "9"):
        with pytest.raises(RefusedError, match="does not say how long it is"):
            servers._stat_of_object({"size": size})


def test_the_packages_of_servers(monkeypatch) -> None:
    for own, missing, said in (
        (Address("s3", "bucket"), "fsspec", advice("{}:// takes further packages: pip install")),
        (
            Address("https", "host/a"),
            "aiohttp",
            advice("https:// takes further packages: pip install 'covmerge[remote]' ({})"),
        ),
    ):
        link_to.cache_clear()
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, missing, None)
            with pytest.raises(InputError, match=said):
                remote_store(own)
        assert remote_store(own)


@pytest.mark.parametrize(
    "sha, files",
    [
        (None, {}),
        ("main", {}),
        ("../../../../tmp", {}),
        (7, {}),
        (COMMIT.upper(), {}),
        (COMMIT, {"a": None}),
        (COMMIT, {"a": -1}),
        (COMMIT, {"a": []}),
        (COMMIT, {3: 1}),
    ],
)
def test_a_hub_that_says_no_commit_or_sizes(monkeypatch, tmp_path, sha, files) -> None:
    found = [{"rfilename": name, "size": size} for name, size in files.items()]
    told = json.dumps({"sha": sha, "siblings": found}).encode()
    monkeypatch.setattr(hub, "_told", lambda *_: told)
    said = advice("or which sizes its files have: download the model and pass its folder")
    with pytest.raises(CheckpointError, match=said):
        HubStore.find("org/name", "org/name", None)
    assert is_commit(COMMIT) and not is_commit(COMMIT + "\n")
    downloaded(tmp_path)


@pytest.mark.parametrize(
    "files, message",
    [
        (2500, advice("more than {} are not fetched: download what is needed and pass its folder")),
        (9000, advice("bytes of its files: download what is needed and pass its folder")),
    ],
)
def test_a_hub_of_files_without_end(tmp_path, monkeypatch, files: int, message: str) -> None:
    monkeypatch.setattr(hub, "_MOST_TOLD", 300_000)
    with serve(tmp_path) as own:
        own.files = dict.fromkeys((f"{number}.json" for number in range(files)), b"")
        connect(monkeypatch, own, tmp_path / "cache")
        with pytest.raises(CheckpointError, match=message):
            HubStore.find("org/name", "org/name", None)
    downloaded(tmp_path)


def test_files_that_a_hub_has_not_or_too_large() -> None:
    store = HubStore("org/name", "org/name", COMMIT, {"README.md": hub._MOST_OF_A_CARD + 1})
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        store.stamp("config.json")
    with pytest.raises(CheckpointError, match="the repository is incomplete"):
        store.check("config.json")
    said = advice("has {} bytes, which no such file needs to have: is it the right repository?")
    with pytest.raises(CheckpointError, match=said):
        store.card("README.md")


def test_windows_are_let_go_of(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_HELD", 5)
    windows, stat = remote._Windows(), FileStat(4, "1")
    for name in ("a", "b"):
        windows.keep(name, remote._Window(stat, 0, b"1234"))
    assert windows.find("a", stat, 0) is None and windows.find("b", stat, 3) is not None
    store = RemoteStore(SimpleNamespace(shown=str), Address("s3", "bucket").path)
    assert store.inside("") is store


def test_where_things_are_kept(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COVMERGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "covmerge"


def test_a_cache_that_there_was_is_no_longer_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVMERGE_REMOTE_CACHE", "50GB")
    said = advice("unset it. To read sources more than once, download them and pass their folders")
    with pytest.raises(InputError, match=said):
        remote_store(Address("s3", "bucket"))
    monkeypatch.delenv("COVMERGE_REMOTE_CACHE")
    assert remote_store(Address("s3", "bucket"))
