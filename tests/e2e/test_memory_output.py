"""A whole merge into a store in memory: the same bytes as a folder, and the same guarantees."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, InputError, TensorError
from covmerge.files.checkpoints.open import open_store
from covmerge.files.stores.destination import Destination, LocalDestination
from covmerge.front.job import Job
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.result import MergeResult
from covmerge.run.sources import open_recipe
from covmerge.run.verification import verify
from tests.interrupted import InterruptAfter
from tests.memory_store import MemoryDestination, MemoryStore
from tests.verification.test_files import save_models


def merge(store: MemoryStore, *arguments, **options) -> MergeResult:
    """Merge files into the folder `merged` of a store."""
    return merge_into(MemoryDestination(store, "merged"), *arguments, **options)


def merge_into(
    out: Destination, base, experts, method="average", output=(), allow=(), **options
) -> MergeResult:
    """Merge files into any destination."""
    recipe = parse_recipe(
        {
            "base": str(base),
            "experts": {name: str(path) for name, path in experts.items()},
            "method": method,
            "output": dict(output),
            "allow": list(allow),
        }
    )
    with open_recipe(recipe) as checkpoints:
        return Job(recipe, out, RunOptions(**options)).run(checkpoints)


def files(folder: Path) -> dict[str, bytes]:
    return {
        f"merged/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("method", "output", "kinds"),
    [
        ("average", {"shard_size": "150KB"}, ("heads/e0.safetensors", "1_Pooling/config.json")),
        ("emr", {}, ("masks/rescalers.json", "masks/e1.safetensors")),
        ("average", {"format": "adapter", "rank": 2}, ("adapter_config.json",)),
    ],
    ids=["shards and heads", "masks", "adapter"],
)
def test_the_same_bytes_as_a_folder(tmp_path: Path, method: str, output, kinds) -> None:
    base, experts = save_models(tmp_path)
    store = MemoryStore()
    result = merge(store, base, experts, method, output)
    assert result.path is None and result.verification.ok
    form = {"form": output["format"], "rank": 2} if "format" in output else output
    covmerge.merge(base, experts, method, tmp_path / "out", **form)
    contents = store.contents()
    assert contents == files(tmp_path / "out")
    names = {"covmerge.json", "README.md", *kinds}
    assert names <= {name.removeprefix("merged/") for name in contents}

    read_at = store.inside("merged")
    checked = verify(read_at)
    assert checked.ok and str(checked.folder) == "memory/merged"
    read = open_store("merged", read_at)
    for name, content in contents.items():
        if name.startswith("merged/model") and name.endswith(".safetensors"):
            for tensor, value in load(content).items():
                assert torch.equal(read.read(tensor), value)
    changed = min(name for name in contents if name.endswith(".safetensors"))
    store.write(changed, b"\xff", len(contents[changed]) - 1)
    assert f"{changed.removeprefix('merged/')} is not as it was" in verify(read_at).checks[0].detail


def test_the_budget_of_memory_holds_the_output(tmp_path: Path, monkeypatch) -> None:
    base, experts = save_models(tmp_path)
    counted = []
    memory = RunOptions.memory

    def count(self, plans, *, held=0, shared=0):
        counted.append((held, plans[0].write_bytes))
        return memory(self, plans, held=held, shared=shared)

    monkeypatch.setattr(RunOptions, "memory", count)
    merge(MemoryStore(), base, experts)
    merge_into(LocalDestination(tmp_path / "out"), base, experts)
    (in_memory, needed), (on_disk, _) = counted
    assert in_memory == needed > 0 and on_disk == 0


def test_a_failed_merge_leaves_nothing(tmp_path: Path) -> None:
    base, experts = save_models(tmp_path)
    store = MemoryStore({"other": b"1"})
    with pytest.raises(CheckFailed, match=r"memory/merged fails its verification.*equals the base"):
        merge(store, base, {"e0": base / "model.safetensors"}, allow=["unchanged-expert"])
    broken = load_file(experts["e1"])
    broken["h.2.proj.weight"][3, 5] = float("nan")
    save_file(broken, experts["e1"])
    with pytest.raises(TensorError, match="NaN"):
        merge(store, base, experts)
    assert store.contents() == {"other": b"1"}


def test_an_interrupted_merge_is_gone_on_with(tmp_path: Path) -> None:
    base, experts = save_models(tmp_path)
    undisturbed, store = MemoryStore(), MemoryStore()
    merge(undisturbed, base, experts)
    with pytest.raises(KeyboardInterrupt):
        merge(store, base, experts, progress=InterruptAfter(2))
    assert not any(name.startswith("merged/") for name in store.contents())
    with pytest.raises(
        InputError, match=r"lies in memory/\.merged\.covmerge-partial: pass resume=True"
    ):
        merge(store, base, experts)
    with pytest.raises(InputError, match="overwrite=True"):  # another recipe destroys nothing
        merge(store, base, experts, "ties", resume=True)
    result = merge(store, base, experts, resume=True)
    assert result.run["resumed_items"] >= 1
    assert store.contents() == undisturbed.contents()


def test_an_output_is_replaced_on_demand_only(tmp_path: Path) -> None:
    base, experts = save_models(tmp_path)
    store = MemoryStore()
    merge(store, base, experts)
    first = store.contents()
    with pytest.raises(InputError, match="memory/merged exists: pass overwrite=True"):
        merge(store, base, experts, "ties")
    assert store.contents() == first
    merge(store, base, experts, "ties", overwrite=True)
    assert store.contents().keys() == first.keys() and store.contents() != first


def test_a_second_merge_into_it_is_refused(tmp_path: Path) -> None:
    base, experts = save_models(tmp_path)
    store = MemoryStore()
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(InputError, match="another process is merging into memory/merged") as e:
            merge(store, base, experts, overwrite=True)
        refused.append(str(e.value))

    class Meanwhile(InterruptAfter):
        def advance(self, what, size, *, resumed=False):
            if not refused:
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()

    merge(store, base, experts, progress=Meanwhile(0))
    assert len(refused) == 1 and "merged/covmerge.json" in store.contents()


def test_processes_cannot_share_it(tmp_path: Path) -> None:
    base, experts = save_models(tmp_path)
    store = MemoryStore()
    with pytest.raises(InputError, match="in memory cannot be shared by processes"):
        merge(store, base, experts, workers=2)
    assert store.contents() == {}
