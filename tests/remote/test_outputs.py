"""Outputs in buckets: the same bytes as a folder, complete or no output, nothing replaced unasked."""

import json
from pathlib import Path

import pytest

import covmerge
from covmerge.base.code import user_cache
from covmerge.errors import InputError
from covmerge.files.stores import servers
from covmerge.files.stores.address import Address
from covmerge.files.stores.destination import Destination
from covmerge.files.stores.link import link_to
from covmerge.files.stores.remote_destination import RemoteDestination
from covmerge.front.job import Job
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.result import MergeResult
from covmerge.run.sources import open_recipe
from covmerge.run.verification import verify
from tests.advised import advice
from tests.cli.runs import covmerge as run
from tests.cli.runs import words
from tests.interrupted import InterruptAfter
from tests.remote.conftest import Bucket, files
from tests.remote.servers import KEYS, cut, status

CLAIM = "merged/.covmerge-upload.json"
SHARDS = {"output": {"shard_size": "150KB"}}


def destination(bucket: Bucket) -> RemoteDestination:
    return RemoteDestination(Address(bucket.scheme, f"{bucket.name}/merged"))


def merge_into(
    out: Destination, base, experts, method="average", output=(), **options
) -> MergeResult:
    """Merge files, with options of a run."""
    named = {name: str(path) for name, path in experts.items()}
    given = {"base": str(base), "experts": named, "method": method, "output": dict(output)}
    recipe = parse_recipe(given)
    with open_recipe(recipe) as checkpoints:
        return Job(recipe, out, RunOptions(**options)).run(checkpoints)


def sent(bucket: Bucket) -> dict[str, bytes]:
    return {n: data for n, data in bucket.contents().items() if n.startswith("merged/")}


def nothing_aside() -> bool:
    uploads = user_cache() / "uploads"
    return not uploads.exists() or list(uploads.iterdir()) == []


def test_a_merge_from_a_bucket_into_it(bucket: Bucket, models, tmp_path: Path) -> None:
    base, experts = models
    there = {
        name: bucket.put(path, f"experts/{name}.safetensors") for name, path in experts.items()
    }
    recipe = tmp_path / "merge.yml"
    lines = [f"base: {bucket.put(base, 'base')}", f"experts: {json.dumps(there)}"]
    recipe.write_text("\n".join([*lines, "method: ties", "output: {shard_size: 150KB}"]))
    bucket.server.fail("GET .*safetensors", cut, 2)
    bucket.server.fail("PUT .*safetensors", status("503 Slow Down"), 2)
    bucket.server.requests.clear()
    ran = run("merge", recipe, f"{bucket.url}/merged", "--workers", 1)
    assert f"{bucket.url}/merged" in words(ran.stdout) and bucket.server.faults == []
    order = [path for method, path, _ in bucket.server.requests if method in ("PUT", "DELETE")]
    names = [path.split("/merged/")[1] for path in dict.fromkeys(order)]
    assert names[0] == Path(CLAIM).name and names[-1] == "covmerge.json"
    assert set(names[-3:-1]) == {"config.json", "model.safetensors.index.json"}

    covmerge.merge(base, experts, "ties", tmp_path / "out", shard_size="150KB")
    here, far = files(tmp_path / "out"), sent(bucket)
    apart = ("merged/covmerge.json", "merged/README.md")  # which say where the sources lie
    assert far.keys() == here.keys()
    assert all(far[name] == here[name] for name in far if name not in apart)
    assert not any(KEYS[key].encode() in data for key in list(KEYS)[:2] for data in far.values())
    assert nothing_aside()

    assert "every check passed" in words(run("verify", f"{bucket.url}/merged", "--deep").stdout)
    again = run("merge", recipe, f"{bucket.url}/merged", code=2)
    assert "exists: pass --overwrite" in words(again.stderr)
    for name in experts:
        inside = run("merge", recipe, f"{bucket.url}/experts/{name}.safetensors/x", code=2)
        assert "overlap" in words(inside.stderr)
    assert sent(bucket) == far


def test_from_any_bucket_into_it(any_bucket: Bucket, models, tmp_path: Path) -> None:
    base, experts = models
    there = {n: any_bucket.put(path, f"{n}.safetensors") for n, path in experts.items()}
    given = {"base": any_bucket.put(base, "base"), "experts": there, "method": "ties"}
    out = f"{any_bucket.url}/merged"
    covmerge.merge(**given, out=out, shard_size="150KB")
    covmerge.merge(base, experts, "ties", tmp_path / "out", shard_size="150KB")
    here, far = files(tmp_path / "out"), sent(any_bucket)
    apart = ("merged/covmerge.json", "merged/README.md")  # which say where the sources lie
    assert far.keys() == here.keys() and nothing_aside()
    assert all(far[name] == here[name] for name in far if name not in apart)
    assert "every check passed" in words(run("verify", out, "--deep").stdout)
    with pytest.raises(InputError, match=r"merged exists: pass overwrite=True"):
        covmerge.merge(**given, out=out)
    any_bucket.system.pipe_file(f"{any_bucket.name}/merged/thesis.tex", b"precious")
    with pytest.raises(InputError, match=r"did not write, so it is not deleted: thesis.tex"):
        covmerge.merge(**given, out=out, overwrite=True)
    any_bucket.system.rm_file(f"{any_bucket.name}/merged/thesis.tex")
    covmerge.merge(**given, out=out, overwrite=True)  # in fewer files
    assert verify(out).ok and "merged/model.safetensors" in sent(any_bucket)


def test_an_interrupted_merge_is_gone_on_with(any_bucket: Bucket, models, tmp_path: Path) -> None:
    base, experts = models
    with pytest.raises(KeyboardInterrupt):
        merge_into(destination(any_bucket), base, experts, progress=InterruptAfter(2), **SHARDS)
    assert sent(any_bucket) == {}
    with pytest.raises(InputError, match=r"an unfinished merge into .*://.* resume=True to go on"):
        merge_into(destination(any_bucket), base, experts, **SHARDS)
    done = merge_into(destination(any_bucket), base, experts, resume=True, **SHARDS)
    assert done.run["resumed_items"] >= 1 and done.path is None
    covmerge.merge(base, experts, "average", tmp_path / "out", shard_size="150KB")
    assert sent(any_bucket) == files(tmp_path / "out") and nothing_aside()


def test_what_a_kill_leaves_of_the_token_is_removed(any_bucket: Bucket, models) -> None:
    """It stayed in the cache for good, and with it the place of the work."""
    base, experts = models
    with pytest.raises(KeyboardInterrupt):
        merge_into(destination(any_bucket), base, experts, progress=InterruptAfter(2), **SHARDS)
    (place,) = (user_cache() / "uploads").iterdir()
    (place / ".token.0123abcd.unfinished").write_text("ha")  # as `replace_file` calls it
    merge_into(destination(any_bucket), base, experts, resume=True, **SHARDS)
    assert nothing_aside()


@pytest.mark.parametrize("broken", ["model-00002", "covmerge.json"])
def test_an_upload_that_breaks_off_is_no_output(
    any_bucket: Bucket, models, tmp_path: Path, monkeypatch, broken: str
) -> None:
    base, experts = models
    send = servers.ObjectServer.send

    async def break_off(self, file, path):
        if broken in path:
            raise PermissionError
        await send(self, file, path)

    with monkeypatch.context() as patch:
        patch.setattr(servers.ObjectServer, "send", break_off)
        said = advice(" with --resume, which goes on with finished work")
        with pytest.raises(InputError, match=f"cannot be reached or written: .*{said}"):
            merge_into(destination(any_bucket), base, experts, **SHARDS)
    assert CLAIM in sent(any_bucket) and "merged/covmerge.json" not in sent(any_bucket)
    # Another machine has none of the work, and keeps away.
    with monkeypatch.context() as patch:
        patch.setenv("COVMERGE_CACHE", str(tmp_path / "elsewhere"))
        with pytest.raises(InputError, match=r"is being written from another machine"):
            merge_into(destination(any_bucket), base, experts, overwrite=True, **SHARDS)
    with pytest.raises(InputError, match="unfinished merge"):
        merge_into(destination(any_bucket), base, experts, **SHARDS)
    merge_into(destination(any_bucket), base, experts, resume=True, **SHARDS)
    assert (
        verify(f"{any_bucket.url}/merged").ok and CLAIM not in sent(any_bucket) and nothing_aside()
    )


def test_without_credentials_there_is_nothing_to_resume(
    bucket: Bucket, models, monkeypatch
) -> None:
    base, experts = models
    for name in KEYS:
        if "KEY" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget = type(bucket.system).clear_instance_cache  # it keeps credentials that it has found
    forget()
    try:
        said = advice("and run it again")
        with pytest.raises(InputError, match=rf"no credentials: .*, {said}$") as error:
            merge_into(destination(bucket), base, experts)
    finally:
        forget()
    assert str(error.value).count("credentials") == 1
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    link_to.cache_clear()
    merge_into(destination(bucket), base, experts)
    assert verify(f"{bucket.url}/merged").ok


def test_an_output_is_replaced_on_demand_only(bucket: Bucket, models) -> None:
    base, experts = models
    merge_into(destination(bucket), base, experts, **SHARDS)
    first = sent(bucket)
    with pytest.raises(InputError, match=r"merged exists: pass overwrite=True"):
        merge_into(destination(bucket), base, experts)
    bucket.system.pipe_file(f"{bucket.name}/merged/thesis.tex", b"precious")
    with pytest.raises(InputError, match=r"did not write, so it is not deleted: thesis.tex"):
        merge_into(destination(bucket), base, experts, overwrite=True)
    bucket.system.rm_file(f"{bucket.name}/merged/thesis.tex")
    assert sent(bucket) == first

    bucket.server.requests.clear()
    merge_into(destination(bucket), base, experts, overwrite=True)  # in fewer files
    changes = [
        (m, Path(path).name) for m, path, _ in bucket.server.requests if m in ("PUT", "DELETE")
    ]
    known, gone, again = (
        changes.index((method, name))
        for method, name in (
            ("PUT", Path(CLAIM).name),
            ("DELETE", "covmerge.json"),
            ("PUT", "covmerge.json"),
        )
    )
    assert (known, gone, again) == (0, 1, len(changes) - 2)  # no output in between
    assert verify(f"{bucket.url}/merged").ok and "merged/model.safetensors" in sent(bucket)
    assert not any("-of-0000" in name for name in sent(bucket))


def test_what_appears_meanwhile_is_not_overwritten(bucket: Bucket, models) -> None:
    class Meanwhile(InterruptAfter):
        def finish(self):
            bucket.system.pipe_file(f"{bucket.name}/merged/config.json", b"{}")

    base, experts = models
    with pytest.raises(InputError, match=r"merged is not known for an output of covmerge"):
        merge_into(destination(bucket), base, experts, progress=Meanwhile(0), **SHARDS)
    assert sent(bucket) == {"merged/config.json": b"{}"}
    bucket.system.rm_file(f"{bucket.name}/merged/config.json")
    merge_into(destination(bucket), base, experts, resume=True, **SHARDS)
    assert verify(f"{bucket.url}/merged").ok


def test_what_another_machine_makes_before_the_claim_is_not_overwritten(
    bucket: Bucket, models, monkeypatch
) -> None:
    base, experts = models
    claim = servers.ObjectServer.claim

    async def late(self, path, content):
        await self._system._pipe_file(f"{bucket.name}/merged/config.json", b"{}")
        await claim(self, path, content)

    with monkeypatch.context() as patch:
        patch.setattr(servers.ObjectServer, "claim", late)
        said = advice(
            "appeared in {}, and is not overwritten: move it away, and go on with --resume"
        )
        with pytest.raises(InputError, match=said):
            merge_into(destination(bucket), base, experts, **SHARDS)
    assert sent(bucket) == {"merged/config.json": b"{}"}
    bucket.system.rm_file(f"{bucket.name}/merged/config.json")
    merge_into(destination(bucket), base, experts, resume=True, **SHARDS)
    assert verify(f"{bucket.url}/merged").ok


def test_what_arrived_is_another_file(bucket: Bucket, models, monkeypatch) -> None:
    base, experts = models
    send = servers.ObjectServer.send

    async def spoil(self, file, path):
        await send(self, file, path)
        if "model-00002" in path:
            await self._system._pipe_file(path, b"other")

    said = advice("does something else write there? The work is kept: go on with --resume")
    with monkeypatch.context() as patch:
        patch.setattr(servers.ObjectServer, "send", spoil)
        with pytest.raises(InputError, match=said):
            merge_into(destination(bucket), base, experts, **SHARDS)
    merge_into(destination(bucket), base, experts, resume=True, **SHARDS)
    assert verify(f"{bucket.url}/merged").ok


def test_a_place_for_an_output_in_a_bucket(bucket: Bucket, models, tmp_path, monkeypatch) -> None:
    base, experts = models

    def homeless():
        raise RuntimeError("no home")

    said = advice("made on this machine first, and there is no place for it: set COVMERGE_CACHE to")
    with monkeypatch.context() as patch:
        patch.delenv("COVMERGE_CACHE", raising=False)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", homeless)
        with pytest.raises(InputError, match=said):
            covmerge.merge(base, experts, "average", f"{bucket.url}/merged")
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    bucket.system.pipe_file(f"{bucket.name}/file", b"")
    with pytest.raises(InputError, match=advice("exists and is no folder: choose another name")):
        covmerge.merge(base, experts, "average", f"{bucket.url}/file")
    covmerge.merge(base, experts, "average", f"{bucket.url}/merged")
    assert verify(f"{bucket.url}/merged").ok


def test_a_file_is_sent_in_parts(bucket: Bucket, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(servers, "_PIECE", 5 * 2**20)
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**16)  # 16 MiB
    work = destination(bucket)
    bucket.server.fail("PUT .*large", status("500 Internal Server Error"), 1)
    from covmerge.files.stores.remote import ask

    ask(work._server, lambda: work._server.send(large, f"{bucket.name}/large"))
    assert bucket.contents()["large"] == large.read_bytes()
    puts = [
        path for method, path, _ in bucket.server.requests if method == "PUT" and "large" in path
    ]
    assert len(puts) == 4 + 1  # and the part that failed once more


@pytest.mark.parametrize("out", ["https://host/merged", "s3://bucket", "gs://bucket"])
def test_where_nothing_is_written(models, out: str, tmp_path: Path) -> None:
    said = advice(
        "no output is written to {}: choose a folder of a bucket, such as s3://bucket/mer"
    )
    with pytest.raises(InputError, match=f"{said}|takes further packages"):
        covmerge.merge(models[0], models[1], "average", out)
    covmerge.merge(models[0], models[1], "average", tmp_path / "merged")
