"""Checkpoints in buckets and on web servers: the same tensors as here, whatever fails on the way."""

import gzip
import json
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge import open_checkpoint
from covmerge.errors import CheckpointError, InputError
from covmerge.files.checkpoints import remote as fetching
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.stores import link, remote, servers
from covmerge.files.stores.address import Address
from covmerge.files.stores.link import RefusedError
from covmerge.files.stores.remote import remote_store
from covmerge.files.stores.store import StoredFile
from covmerge.run.verification import verify
from tests.advised import advice
from tests.checkpoints.test_distributed import save as save_shards
from tests.forked import fork_workers
from tests.interrupted import InterruptAfter
from tests.remote.conftest import Bucket
from tests.remote.servers import KEYS, Server, cut, files, late, serving, status

BASE = "model.safetensors"


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A web server and its folder."""
    folder = tmp_path / "pages"
    folder.mkdir()
    with serving(files(folder)) as server:
        yield server, folder


def equals(checkpoint, path: Path) -> bool:
    stored = load_file(path)
    return list(checkpoint.headers) == list(stored) and all(
        torch.equal(checkpoint.read(name), value) for name, value in stored.items()
    )


def base_of(models) -> Path:
    return models[0] / BASE


def test_a_folder_of_a_bucket(any_bucket: Bucket, models) -> None:
    base, _ = models
    address = any_bucket.put(base, "models/base")
    any_bucket.put(base / "config.json", "models/README.md")
    checkpoint = open_checkpoint(address)
    assert checkpoint.source == address and checkpoint.config == {"hidden_size": 96}
    assert equals(checkpoint, base / BASE)
    assert torch.equal(
        checkpoint.read("h.1.proj.weight", range(3, 9)),
        load_file(base / BASE)["h.1.proj.weight"][3:9],
    )
    assert checkpoint.folder is None and checkpoint.readme() is None
    checkpoint.materialize()
    beside = checkpoint.companions()
    assert beside is not None and {path.name for path in beside.iterdir()} == {
        "1_Pooling",
        "config.json",
        "tokenizer.json",
    }
    found = fingerprint(checkpoint)
    assert set(found) == {"model.safetensors", "config.json"}
    assert found["model.safetensors"].startswith("version:")
    checkpoint.close()
    assert not beside.exists()


def test_a_file_and_an_adapter_of_a_bucket(any_bucket: Bucket, models, tmp_path: Path) -> None:
    base, experts = models
    alone = open_checkpoint(any_bucket.put(experts["e0"], "e0.safetensors"))
    assert equals(alone, experts["e0"]) and alone.companions() is None
    covmerge.extract(base, experts["e0"], tmp_path / "lora", 2)
    here = open_checkpoint(tmp_path / "lora")
    there = open_checkpoint(any_bucket.put(tmp_path / "lora", "lora"))
    name = "h.1.proj.weight"
    assert torch.equal(there.read_update(name).left, here.read_update(name).left)
    assert there.identity()["kind"] == "remote"


def test_shards_of_a_bucket(any_bucket: Bucket, models, tmp_path: Path) -> None:
    state = load_file(models[1]["e0"])
    folder = save_shards({"model": state, "optimizer": {"x": torch.ones(3)}}, tmp_path / "shards")
    checkpoint = open_checkpoint(any_bucket.put(folder, "shards"))
    assert set(checkpoint.headers) == set(state)
    assert all(torch.equal(checkpoint.read(name), value) for name, value in state.items())
    assert set(fingerprint(checkpoint)) == {".metadata", "__0_0.distcp"}


def test_small_reads_are_served_together_and_large_ones_in_parts(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_SHORTEST", 2**16)
    monkeypatch.setattr(link, "_LONGEST", 2**16)
    monkeypatch.setattr(remote, "_SMALL", 2**17)
    monkeypatch.setattr(remote, "_WINDOW", 2**14)
    many = {f"bias.{n:03}": torch.randn(8) for n in range(100)}
    path = tmp_path / "m.safetensors"
    save_file({**many, "weight": torch.randn(400, 100)}, path)
    address = bucket.put(path, "m.safetensors")
    bucket.server.requests.clear()
    checkpoint = open_checkpoint(address)
    for name in many:
        checkpoint.read(name)
    reads = [r for r in bucket.server.requests if r[0] == "GET"]
    assert len(reads) <= 3  # the header, and what is beside it
    bucket.server.requests.clear()
    assert equals(checkpoint, path)
    assert sum(r[0] == "GET" and r[2] != "" for r in bucket.server.requests) <= 2 + 3


def test_a_long_file_is_read_ahead(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 1024
    bucket.system.pipe_file(f"{bucket.name}/folder/long", content)
    monkeypatch.setattr(remote, "_WINDOW", 2**12)
    file = StoredFile(remote_store(Address("s3", f"{bucket.name}/folder")), "long")
    found = bytearray()
    chunk = memoryview(bytearray(2**10))
    bucket.server.requests.clear()
    with file.open() as opened:
        while count := opened.read_at(chunk, len(found)):
            found += chunk[:count]
    assert found == content
    assert len([r for r in bucket.server.requests if r[0] == "GET"]) == 7  # 4, 8, ... 256 KiB


@pytest.mark.parametrize(
    "fault",
    [status("500 Internal Server Error"), status("503 Slow Down"), cut],
    ids=["500", "503", "cut"],
)
def test_what_fails_in_passing_is_asked_for_again(bucket: Bucket, models, fault) -> None:
    base, _ = models
    address = bucket.put(base, "base")
    bucket.server.fail(r"(GET|HEAD) /", fault, 3)
    assert equals(open_checkpoint(address), base / BASE)
    assert bucket.server.faults == []


def test_a_server_that_stands_still_is_asked_again(pages, models, monkeypatch) -> None:
    server, folder = pages
    monkeypatch.setattr(servers, "SILENCE", 0.3)
    shutil.copytree(models[0], folder / "base")
    address = f"{server.url}/base/{BASE}"
    server.fail("model.safetensors$", late(1.0))
    assert equals(open_checkpoint(address), models[0] / BASE)
    assert server.faults == []


def test_a_bucket_that_stands_still_is_asked_again(bucket: Bucket, models, monkeypatch) -> None:
    patience = {**servers._READING["s3"]["config_kwargs"], "read_timeout": 0.3}
    monkeypatch.setitem(servers._READING, "s3", {"config_kwargs": patience})
    address = bucket.put(models[0], "base")
    bucket.server.fail(f"GET .*{BASE}", late(1.0), 2)
    start = time.monotonic()
    checkpoint = open_checkpoint(address)
    assert equals(checkpoint, models[0] / BASE)
    assert bucket.server.faults == [] and time.monotonic() - start > 2 * 0.3

    bucket.server.fail(f"GET .*{BASE}", late(1.0), 1000)
    checkpoint._store._windows._held.clear()
    with pytest.raises(CheckpointError, match=rf"{address}/{BASE}.* it failed 6 times \(.*Timeout"):
        checkpoint.read("h.3.proj.weight")


def test_what_fails_for_good_names_the_file_and_no_secret(bucket: Bucket, models) -> None:
    address = bucket.put(models[0], "base")
    checkpoint = open_checkpoint(address)
    bucket.server.fail("GET", status("500 Internal Server Error"), 1000)
    with pytest.raises(CheckpointError) as error:
        checkpoint.read("h.3.proj.weight")
        open_checkpoint(address)
    shown = f"{error.value!r} {error.value.__cause__!r}"
    assert "cannot be" in shown and "it failed 6 times (status 500)" in shown and address in shown
    assert not any(KEYS[name] in shown for name in list(KEYS)[:2])


def test_what_is_not_allowed_is_asked_for_once(bucket: Bucket, models) -> None:
    address = bucket.put(models[0], "base")
    bucket.server.requests.clear()
    bucket.server.fail("GET", status("403 Forbidden"), 1000)
    said = advice("the server does not let you ({}): check the credentials in the environment")
    with pytest.raises(CheckpointError, match=f"cannot be listed: {said}"):
        open_checkpoint(address)
    assert len(bucket.server.requests) == 1
    bucket.server.faults.clear()  # to the right ones
    assert equals(open_checkpoint(address), base_of(models))


def test_a_server_that_is_gone(bucket: Bucket, models) -> None:
    address = bucket.put(models[0], "base")
    index = b'{"weight_map": {"w": "model-00001.safetensors"}}'
    bucket.system.pipe_file(f"{bucket.name}/sharded/model.safetensors.index.json", index)
    bucket.server.fail("HEAD", status("500 Internal Server Error"), 1000)
    for source in (f"{bucket.url}/sharded", f"{address}/{BASE}"):
        with pytest.raises(CheckpointError, match=r"s3://.* it failed 6 times \(status 500\)"):
            open_checkpoint(source)
    with pytest.raises(InputError, match=r"s3://.* it failed 6 times \(status 500\)"):
        verify(address)


def test_without_credentials(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models
) -> None:
    address = bucket.put(models[0], "base")
    said = advice("no credentials: give them in the environment (docs/remote.md)")
    with monkeypatch.context() as patch:
        for name in list(KEYS)[:2]:
            patch.delenv(name)
        type(bucket.system).clear_instance_cache()
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            patch.setenv(name, str(tmp_path / "none"))
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(address)
    type(bucket.system).clear_instance_cache()
    link.link_to.cache_clear()
    assert equals(open_checkpoint(address), base_of(models))


def test_a_changed_file_is_refused(any_bucket: Bucket, models, monkeypatch) -> None:
    base, experts = models
    address = any_bucket.put(base, "base")
    checkpoint = open_checkpoint(address)
    any_bucket.system.pipe_file(f"{any_bucket.name}/base/{BASE}", experts["e0"].read_bytes())
    with pytest.raises(CheckpointError, match=r"://.*base/model.safetensors changed while it was"):
        fingerprint(checkpoint)
    monkeypatch.setattr(remote, "_FRESH", 0.0)
    with pytest.raises(CheckpointError, match=r"changed while it was in use"):
        checkpoint.read("h.0.proj.weight")


def test_what_there_is_not(any_bucket: Bucket, models, tmp_path: Path) -> None:
    for address in (f"{any_bucket.url}/nothing", f"{any_bucket.scheme}://no-such-bucket/base"):
        with pytest.raises(CheckpointError, match=r"://.* holds no weights"):
            open_checkpoint(address)
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be opened: No such file"):
        open_checkpoint(f"{any_bucket.url}/x.safetensors")
    any_bucket.put(models[0] / "config.json", "pickled/pytorch_model.bin")
    said = advice("{} is a pickle, and those are read from folders of this machine: copy it there")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(f"{any_bucket.url}/pickled")
    torch.save(load_file(base_of(models)), tmp_path / "pytorch_model.bin")
    assert equals(open_checkpoint(tmp_path), base_of(models))


def test_names_stay_below_their_prefix(any_bucket: Bucket, models) -> None:
    any_bucket.put(models[0], "secret")
    index = b'{"weight_map": {"w": "../secret/model.safetensors"}}'
    any_bucket.system.pipe_file(f"{any_bucket.name}/open/model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"only bare names"):
        open_checkpoint(f"{any_bucket.url}/open")


def test_a_file_of_a_web_server(pages, models) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "my base")
    checkpoint = open_checkpoint(f"{server.url}/my%20base/{BASE}")
    assert equals(checkpoint, models[0] / BASE)
    assert checkpoint.companions() is None and checkpoint.readme() is None
    checkpoint.close()
    shutil.copy(models[0] / BASE, folder / "a b.safetensors")
    assert equals(open_checkpoint(f"{server.url}/a%20b.safetensors"), folder / "a b.safetensors")
    (folder / "my base" / BASE).touch()
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        fingerprint(checkpoint)


@pytest.mark.parametrize("name", ["base", "base/", "base/model.safetensors.index.json"])
def test_a_folder_of_a_web_server_is_refused(name: str, pages, models) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "base")
    said = advice("lists no folders: name such a file, or download the folder and pass its path")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(f"{server.url}/{name}")
    for right in (f"{server.url}/base/{BASE}", folder / "base"):
        assert equals(open_checkpoint(right), base_of(models))


def test_a_web_server_without_ranges_or_versions(tmp_path: Path, models, monkeypatch) -> None:
    shutil.copytree(models[0], tmp_path / "base")
    with serving(files(tmp_path, headers={}, ranges=False)) as server:
        checkpoint = open_checkpoint(f"{server.url}/base/{BASE}")
        assert equals(checkpoint, models[0] / BASE)
        here = fingerprint(open_checkpoint(models[0] / BASE))
        assert fingerprint(checkpoint) == here  # nothing tells versions: the files are hashed
        monkeypatch.setattr(servers, "_WHOLE", 100)
        said = advice("the server sends no ranges of it: download it, and pass its folder")
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(f"{server.url}/base/{BASE}")
        assert equals(open_checkpoint(tmp_path / "base"), base_of(models))


def test_a_file_without_versions_that_changes_is_noticed(
    tmp_path: Path, models, monkeypatch
) -> None:
    fork_workers(monkeypatch)
    base, experts = models
    weights = tmp_path / "expert.safetensors"
    shutil.copy(experts["e0"], weights)
    monkeypatch.setattr(remote, "_SMALL", 1)  # nothing is held of what was read
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with serving(files(tmp_path, headers={})) as server:
        address = f"{server.url}/{weights.name}"
        for options in ({"workers": 2}, {"executor": "ranks"}):
            said = advice("download it and pass its folder, or leave out --workers and --executor")
            with pytest.raises(InputError, match=said):
                covmerge.merge(base, [address], "average", tmp_path / "out", **options)
        checkpoint = open_checkpoint(address)
        checkpoint.read("h.3.proj.weight")
        weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")  # as long as before
        with pytest.raises(CheckpointError, match=rf"{address}.*it changed while"):
            fingerprint(checkpoint)
        assert not (tmp_path / "out").exists()
        shutil.copy(experts["e0"], weights)
        covmerge.merge(base, [address], "average", tmp_path / "out")
    covmerge.merge(base, [weights], "average", tmp_path / "another", workers=2)


def test_a_web_server_may_send_what_it_likes(pages, models) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "base")
    checkpoint = open_checkpoint(f"{server.url}/base/{BASE}")

    def more(right, environ, start):
        """Whatever was asked for, another range, and far more of it."""
        start("206 Partial Content", [("Content-Range", "bytes 0-9/10"), ("ETag", '"x"')])
        return (bytes(2**20) for _ in range(1000))

    server.fail("GET", more, 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*changed while it was in use"):
        checkpoint.read("h.3.proj.weight", range(1))
        checkpoint._store._windows._held.clear()
        checkpoint.read("h.3.proj.weight", range(1))


def test_what_is_compressed_is_not_unpacked(pages, models) -> None:
    """A few bytes would become as many as the server likes, and ranges be those of other bytes."""
    server, folder = pages
    shutil.copytree(models[0], folder / "base")

    def compressed(right, environ, start):
        packed = gzip.compress(bytes(2**20))
        told = [("Content-Range", "bytes 0-9/10"), ("Content-Encoding", "gzip")]
        start("206 Partial Content", [*told, ("Content-Length", str(len(packed)))])
        return [packed]

    server.fail(BASE, compressed, 10)
    said = advice("the server sends it compressed, unasked: download it, and pass its folder")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(f"{server.url}/base/{BASE}")
    assert equals(open_checkpoint(folder / "base"), base_of(models))


def test_a_page_is_no_file(pages, models) -> None:
    """Servers answer what they have not by a page that says so, as if it were there."""
    server, folder = pages
    shutil.copytree(models[0], folder / "base")

    def page(_, environ, start):
        start("200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Content-Length", "6")])
        return [b"<html>"]

    server.fail(BASE, page, 100)
    with pytest.raises(CheckpointError, match=f"{BASE} cannot be opened: No such file"):
        open_checkpoint(f"{server.url}/base/{BASE}")


@pytest.mark.parametrize(
    "leads, said",
    [
        ("http://127.0.0.2:9/x", "a machine of this network"),
        ("http://localhost./x", "a machine of this network"),
        ("http://0x7f000001/x", "a machine of this network"),
        ("http://[x/", "no address of a web page"),
        ("file:///etc/passwd", "no address of a web page"),
        ("http://user@example.org/", "no address of a web page"),
        ("?again", "from one address to the next 6 times"),
    ],
)
def test_where_a_web_server_may_not_lead(pages, models, leads: str, said: str) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "base")

    def onward(_, environ, start):
        start("302 Found", [("Location", leads), ("Content-Length", "0")])
        return []

    server.fail(".*", onward, 100)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(f"{server.url}/base/{BASE}")
    with pytest.raises(RefusedError, match="not protected as https is"):
        servers.onward("https://example.org/a", "http://example.org/a")


def test_a_machine_of_this_network_is_named(pages, models) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "base")
    named = server.url.replace("127.0.0.1", "localhost") + f"/base/{BASE}"

    def onward(_, environ, start):
        start("302 Found", [("Location", named), ("Content-Length", "0")])
        return []

    server.fail(".*", onward, 100)
    said = advice("the server leads to {}, a machine of this network: name it yourself")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(f"{server.url}/base/{BASE}")
    server.faults.clear()
    assert equals(open_checkpoint(named), base_of(models))


def test_a_merge_of_files_without_versions_is_not_resumed(tmp_path, models) -> None:
    """Nothing tells whether they are what the first run read."""
    folder = tmp_path / "pages"
    shutil.copytree(models[0], folder / "base")
    _, experts = models
    with serving(files(folder, {})) as server:
        base, out = f"{server.url}/base/{BASE}", tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            covmerge.merge(base, experts, out=out, progress=InterruptAfter(2))
        said = advice(
            "does not say whether {} changed since the merge was begun: start over with --ov"
        )
        with pytest.raises(InputError, match=said):
            covmerge.merge(base, experts, out=out, resume=True)
        assert covmerge.merge(base, experts, out=out, overwrite=True).verification.ok


def test_a_range_that_was_not_asked_for(pages, models) -> None:
    server, folder = pages
    shutil.copytree(models[0], folder / "base")
    checkpoint = open_checkpoint(f"{server.url}/base/{BASE}")

    def answer(code: str, *headers: tuple[str, str]):
        def fault(right, environ, start):
            known = []
            body = b"".join(right(environ, lambda status, told: known.extend(told)))
            tag = [own for own in known if own[0] == "ETag"]
            start(code, [*headers, *tag, ("Content-Length", str(len(body)))])
            return [body]

        return fault

    for fault, said in (
        (answer("206 Partial Content", ("Content-Range", "bytes 7-9/99")), r"failed 6 times"),
        (answer("203 Copied"), "answers by status 203"),
    ):
        checkpoint._store._windows._held.clear()
        server.faults.clear()
        server.fail("GET", fault, 100)
        with pytest.raises(CheckpointError, match=said):
            checkpoint.read("h.3.proj.weight", range(1))


def test_too_many_or_too_large_files_beside_the_weights(
    bucket: Bucket, models, monkeypatch
) -> None:
    address = bucket.put(models[0], "base")
    monkeypatch.setattr(fetching, "_MANY", 0)
    said = advice("files beside its weights, and {} are fetched: pass the folder of one model")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(address).companions()
    monkeypatch.setattr(fetching, "_MANY", 200)
    monkeypatch.setattr(fetching, "_MOST", 1)
    said = advice("has {} bytes, which no such file needs to have: is it the right folder?")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(address).companions()
    monkeypatch.setattr(fetching, "_MOST", 2**30)  # of one model, by the limits as they are
    checkpoint = open_checkpoint(address)  # which keeps the folder while it is open
    beside = checkpoint.companions()
    assert beside is not None and (beside / "config.json").is_file()
    checkpoint.close()


class _Early(socketserver.BaseRequestHandler):
    """Sends answers before the answer, without end."""

    def handle(self) -> None:
        with suppress(OSError):
            while True:
                self.request.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 1000)


def test_a_server_that_never_comes_to_its_answer_is_not_listened_to_for_long(monkeypatch) -> None:
    monkeypatch.setattr(servers, "SILENCE", 0.1)
    monkeypatch.setattr(link, "WAITS", (0.01,))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Early) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(CheckpointError, match=r"it failed 2 times \(TimeoutError\)"):
            open_checkpoint(f"http://127.0.0.1:{port}/model.safetensors")
        server.shutdown()


def test_modules_with_weights_of_their_own(bucket: Bucket, tmp_path: Path) -> None:
    """Folders as sentence-transformers saves them: merged from there as from here, byte for byte."""
    folder = tmp_path / "models"
    modules = [{"path": ""}, {"path": "2_Dense", "type": "models.Dense"}]
    there = {}
    for number, name in enumerate(("base", "a")):
        (folder / name / "2_Dense").mkdir(parents=True)
        moved = 0.1 * number
        save_file({"w.weight": torch.eye(4) + moved}, folder / name / BASE)
        save_file({"linear.weight": torch.ones(2, 4) + moved}, folder / name / "2_Dense" / BASE)
        (folder / name / "2_Dense" / "config.json").write_text('{"in_features": 4}')
        (folder / name / "modules.json").write_text(json.dumps(modules))
        there[name] = bucket.put(folder / name, name)
    covmerge.merge(folder / "base", {"a": folder / "a"}, "average", tmp_path / "here")
    covmerge.merge(there["base"], {"a": there["a"]}, "average", tmp_path / "there")
    for file in (BASE, f"2_Dense/{BASE}", "2_Dense/config.json", "modules.json"):
        assert (tmp_path / "there" / file).read_bytes() == (tmp_path / "here" / file).read_bytes()
    found = load_file(tmp_path / "there" / "2_Dense" / BASE)["linear.weight"]
    torch.testing.assert_close(found, torch.ones(2, 4) + 0.1)
