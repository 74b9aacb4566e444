"""Processes and ranks that merge from a bucket, and ranks into one, which share the folder of the work."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

import covmerge
from covmerge.errors import InputError
from covmerge.files.stores.store import StoredFile
from tests.cli.runs import words
from tests.e2e.test_resume import save_plain
from tests.engine.test_ranks import _READING, _WAIT, command, has_claimed
from tests.forked import Forked
from tests.held import COMMAND_LINE, wait_until
from tests.remote.conftest import Bucket, files
from tests.remote.test_outputs import destination, sent

SHARDS = "--shard-size=60KB"
_APART = ("merged/covmerge.json", "merged/README.md")  # which say where the sources lie


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=12, width=64)


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    """What one process writes from files and to files, by method."""
    folder = tmp_path_factory.mktemp("whole")
    for method in ("ace", "ties"):
        covmerge.merge(*plain, method, folder / method, shard_size="60KB")
    return {method: models(files(folder / method)) for method in ("ace", "ties")}


def models(found: dict[str, bytes]) -> dict[str, bytes]:
    """What of an output does not say where its sources lie."""
    return {name: data for name, data in found.items() if name not in _APART}


def in_bucket(bucket: Bucket, plain) -> tuple[str, dict[str, str]]:
    base, experts = plain
    there = {name: bucket.put(path, f"{name}.safetensors") for name, path in experts.items()}
    return bucket.put(base, "base.safetensors"), there


def rank(plain, out: str, number: int, cache: Path, go: Path, patience: int = 5) -> Forked:
    """A rank of two, with the cache of its machine, which reads nothing before a file is there."""
    given, environment = command(plain, "ace", out, number, 2, SHARDS, patience=patience)
    environment["COVMERGE_CACHE"] = str(cache)
    return Forked(_WAIT + _READING + COMMAND_LINE, go, *given, environment=environment)


def ranks(stack: ExitStack, *started: Forked) -> tuple[Forked, ...]:
    for each in started:
        stack.callback(each.wait)
        stack.callback(each.kill)
    return started


def claimed(cache: Path, number: int) -> bool:
    """Whether a rank has begun an item of the merge that goes on in a cache."""
    return any(has_claimed(folder, number) for folder in cache.glob("uploads/*/.*/ranks/0"))


@pytest.mark.slow
def test_processes_from_a_bucket(bucket: Bucket, plain, whole, tmp_path: Path) -> None:
    merged = covmerge.merge(
        *in_bucket(bucket, plain), "ties", tmp_path / "out", shard_size="60KB", workers=2, threads=1
    )
    assert merged.run["workers"] == 2
    assert models(files(tmp_path / "out")) == whole["ties"]


@pytest.mark.slow
def test_ranks_from_a_bucket_into_it(bucket: Bucket, plain, whole, tmp_path: Path) -> None:
    there, cache, go = in_bucket(bucket, plain), tmp_path / "cache", tmp_path / "go"
    with ExitStack() as stack:
        both = ranks(stack, *(rank(there, f"{bucket.url}/merged", n, cache, go) for n in range(2)))
        for number in range(2):
            wait_until(lambda number=number: claimed(cache, number), both[number])
        go.touch()
        said = [words(" ".join(each.communicate())) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    own = re.search(r"rank 1 of 2: (\d+) of (\d+) items were done here", said[1])
    assert own and 0 < int(own[1]) < int(own[2])
    assert models(sent(bucket)) == whole["ace"]
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["made"]

    # One that comes late has nothing to do, and says so; which output that is, the folder knows.
    late = rank(there, f"{bucket.url}/merged", 1, cache, go)
    assert "rank 1 of 2: 0 of 12" in words(" ".join(late.communicate()))
    assert late.returncode == 0


@pytest.mark.slow
def test_ranks_that_do_not_share_a_cache_say_so(
    bucket: Bucket, plain, whole, tmp_path: Path
) -> None:
    """Whether one waits in vain for the others, or until they are done."""
    there, go = in_bucket(bucket, plain), tmp_path / "go"
    out, caches = f"{bucket.url}/merged", [tmp_path / f"cache{number}" for number in range(2)]
    with ExitStack() as stack:
        first, waiting, impatient = ranks(
            stack,
            rank(there, out, 0, caches[0], go),
            rank(there, out, 1, caches[1], go, patience=60),
            rank(there, out, 1, caches[1], go, patience=1),
        )
        said = words(impatient.communicate()[1])
        assert impatient.returncode == 2 and f"leads the merge in {caches[1]}" in said, said
        assert "an output on a URL it lies in COVMERGE_CACHE" in said
        go.touch()
        assert first.wait() == 0, first.communicate()
        said = words(waiting.communicate()[1])
        assert waiting.returncode == 2 and str(caches[1]) in said and "COVMERGE_CACHE" in said, said
    assert models(sent(bucket)) == whole["ace"]


def test_what_was_made_elsewhere_is_known(bucket: Bucket, tmp_path: Path, monkeypatch) -> None:
    """By what lies where the work was."""
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "one"))
    leading, helping = destination(bucket), destination(bucket)
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "other"))
    strange = destination(bucket)
    for each in (leading, helping, strange):
        each.share()
    leading.take()
    leading.begin()
    assert not helping.is_made_here()
    (leading.work.folder / "covmerge.json").write_text("{}")
    send = leading._send

    def meanwhile(name: str) -> None:
        send(name)
        assert helping.occupant() is None
        with pytest.raises(InputError, match=r"if it shares this merge, .*other.* COVMERGE_CACHE"):
            strange.occupant()

    monkeypatch.setattr(leading, "_send", meanwhile)
    leading.publish()
    leading.discard()
    assert helping.occupant() and strange.occupant()
    assert helping.is_made_here() and not strange.is_made_here()

    def and_ended(self: StoredFile, limit: int) -> bytes:
        found = read(self, limit)
        bucket.system.rm_file(claim)
        return found

    read, claim = StoredFile.read, f"{bucket.name}/merged/.covmerge-upload.json"
    with monkeypatch.context() as patch:
        patch.setattr(StoredFile, "read", and_ended)
        bucket.system.pipe_file(claim, b'{"upload": "whose token is removed", "files": []}')
        assert helping.occupant()
    bucket.system.pipe_file(f"{bucket.name}/merged/covmerge.json", b"{ }")
    assert not helping.is_made_here()

    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "one"))
    alone = destination(bucket)  # which replaces it, and leaves nothing there
    assert alone.occupant()
    alone.take()
    alone.begin()
    (alone.work.folder / "covmerge.json").write_text("{}")
    alone.publish()
    alone.discard()
    assert not any((tmp_path / "one" / "uploads").iterdir())


@pytest.mark.parametrize("executor", ["ranks", "ray"])
def test_where_machines_share_the_work_has_to_be_said(
    bucket: Bucket, plain, monkeypatch, executor: str
) -> None:
    monkeypatch.delenv("COVMERGE_CACHE", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "RAY_ADDRESS": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="set COVMERGE_CACHE to a folder that all machines see"):
        covmerge.merge(*plain, "average", f"{bucket.url}/merged", executor=executor)
    assert sent(bucket) == {} and "COVMERGE_CACHE" not in os.environ
