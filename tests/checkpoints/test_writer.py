import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.errors import CheckpointError, InputError, TensorError
from covmerge.files.checkpoints.layout import Layout, plan_layout
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.files.stores.store import Store
from tests.advised import advice
from tests.checkpoints.conftest import content


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(16, 8, generator=generator),
        "b": torch.randn(7, 3, 2, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "c": torch.randn(16, 8, generator=generator),
    }


def layout_of(tensors: dict[str, Tensor], shard_size: int = 600) -> Layout:
    return plan_layout(
        [TensorHeader(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], shard_size
    )


def write_all(folder: Path | Store, tensors: dict[str, Tensor]) -> None:
    writer = ShardWriter(folder, layout_of(tensors))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.flush()


def test_safetensors_reads_what_was_written(store: Store, tensors: dict[str, Tensor]) -> None:
    write_all(store, tensors)
    read: dict[str, Tensor] = {}
    for data in content(store).values():
        read |= load(data)
    assert read.keys() == tensors.keys()
    assert len(store.names()) == 2
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_bytes_depend_on_the_tensors_only(store: Store, tensors: dict[str, Tensor]) -> None:
    whole, pieces = store.inside("whole"), store.inside("pieces")
    write_all(whole, tensors)
    work: list[tuple[str, Tensor, range | None]] = [
        ("count", tensors["count"], None),
        *(("b", tensors["b"][i : i + 1], range(i, i + 1)) for i in range(7)),
        *(("a", tensors["a"][i : i + 5], range(i, min(i + 5, 16))) for i in range(0, 16, 5)),
        ("mask", tensors["mask"], range(0, 3)),
        ("c", tensors["c"], None),
        ("c", tensors["c"], None),
    ]
    random.Random(0).shuffle(work)
    writer = ShardWriter(pieces, layout_of(tensors))
    threads = [
        threading.Thread(target=lambda part: [writer.write(*w) for w in part], args=(work[i::2],))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(pieces) == content(whole)


def test_the_size_is_reserved_at_once(tmp_path: Path) -> None:
    layout = layout_of({"w": torch.empty(1000, 1000)}, 10**9)
    ShardWriter(tmp_path, layout)
    found = (tmp_path / "model.safetensors").stat()
    assert found.st_size == layout.size
    assert found.st_blocks * 512 >= layout.size


def test_the_checksum_is_that_of_the_bytes_in_the_file(
    store: Store, tensors: dict[str, Tensor]
) -> None:
    writer = ShardWriter(store, layout_of(tensors))
    checksums = {name: writer.write(name, tensor) for name, tensor in tensors.items()}
    assert len(set(checksums.values())) == len(tensors)
    assert {name: writer.read_back(name) for name in tensors} == checksums
    rows = writer.write("a", tensors["a"][3:9], range(3, 9))
    assert rows == writer.read_back("a", range(3, 9)) != checksums["a"]


def test_read_back_sees_a_changed_bit(store: Store, tensors: dict[str, Tensor]) -> None:
    layout = layout_of(tensors)
    writer = ShardWriter(store, layout)
    checksum = writer.write("a", tensors["a"])
    offset = layout.shards[0].entries["a"].offset
    store.write(layout.shards[0].file_name, memoryview(b"\xff"), offset + 17)
    assert writer.read_back("a") != checksum


def test_large_tensors_are_read_back_in_chunks(store: Store) -> None:
    tensor = torch.arange(5_000_000, dtype=torch.int32)  # 20 MB, no multiple of a chunk
    writer = ShardWriter(store, layout_of({"w": tensor}))
    assert writer.write("w", tensor) == writer.read_back("w")


def test_files_that_exist_are_kept_and_missing_ones_created(
    store: Store, tensors: dict[str, Tensor]
) -> None:
    layout = layout_of(tensors)
    checksum = ShardWriter(store, layout).write("a", tensors["a"])
    lost = next(s.file_name for s in layout.shards if "a" not in s.entries)
    store.remove(lost)
    if store.folder is not None:
        (store.folder / f".{lost}.new").write_bytes(b"left by a kill")
    assert ShardWriter(store, layout).read_back("a") == checksum
    assert sorted(store.names()) == [s.file_name for s in layout.shards]


def test_files_of_another_layout_are_refused(store: Store, tensors: dict[str, Tensor]) -> None:
    ShardWriter(store, layout_of(tensors))
    before = content(store)
    renamed = {("A" if name == "a" else name): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*header differs.*overwrite=True"):
        ShardWriter(store, layout_of(renamed))
    first = "model-00001-of-00002.safetensors"
    store.truncate(first, 100)
    before[first] = before[first][:100]
    with pytest.raises(CheckpointError, match="it has 100 bytes, planned are"):
        ShardWriter(store, layout_of(tensors))
    assert content(store) == before


def test_a_link_in_the_place_of_a_shard_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "precious").write_text("precious")
    (folder / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="cannot resume into"):
        ShardWriter(folder, layout_of(tensors))
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_shard_cut_short_is_noticed(store: Store, tensors: dict[str, Tensor]) -> None:
    layout = layout_of(tensors)
    writer = ShardWriter(store, layout)
    name = layout.shards[0].file_name
    store.truncate(name, layout.shards[0].entries["a"].offset + 10)
    with pytest.raises(CheckpointError, match="ends at byte"):
        writer.read_back("a")
    store.remove(name)
    with pytest.raises(CheckpointError, match="cannot read back"):
        writer.read_back("a")
    with pytest.raises(InputError, match=r"cannot write .*00001"):
        writer.write("a", tensors["a"])


def test_only_the_planned_tensor_is_written(store: Store, tensors: dict[str, Tensor]) -> None:
    writer = ShardWriter(store, layout_of(tensors))
    before = content(store)
    a = tensors["a"]
    for tensor, rows, message in [
        (a.double(), None, r"planned as \(16, 8\) of torch.float32, and is .* torch.float64"),
        (a[:4], None, r"planned as \(16, 8\) .* is \(4, 8\)"),
        (a[:4], range(2, 7), r"planned as \(5, 8\) .* is \(4, 8\)"),
        (a[:4], range(14, 18), "no contiguous rows"),
        (
            a.t().contiguous().t(),
            None,
            advice("call .cpu().contiguous().resolve_conj() on it"),
        ),
        (a.to("meta"), None, "device meta"),
    ]:
        with pytest.raises(TensorError, match=message):
            writer.write("a", tensor, rows)
    with pytest.raises(TensorError, match=advice("'{}' is not in the layout of {}: plan it first")):
        writer.write("x", a)
    with pytest.raises(TensorError, match="'x' is not in the layout"):
        writer.read_back("x")
    assert content(store) == before
    writer.write("a", a.t().contiguous().t().cpu().contiguous().resolve_conj())
    assert writer.read_back("a")


def test_what_is_not_in_the_layout_is_planned(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    own = {**tensors, "x": tensors["a"]}
    writer = ShardWriter(tmp_path, layout_of(own))
    writer.write("x", own["x"])
    assert writer.read_back("x")


def test_a_conjugate_view_is_refused(store: Store) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    writer = ShardWriter(store, layout_of({"z": tensor}))
    with pytest.raises(TensorError, match="resolve_conj"):
        writer.write("z", tensor.conj())


def test_parameters_that_require_gradients_are_written(store: Store) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    ShardWriter(store, layout_of({"w": weight})).write("w", weight)
    assert torch.equal(load(content(store)["model.safetensors"])["w"], weight)


def test_short_writes_are_continued(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A single write takes 2 GiB at most; no test should write so much.
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]))
    write_all(tmp_path, tensors)
    assert torch.equal(load_file(tmp_path / "model-00001-of-00002.safetensors")["a"], tensors["a"])


def test_a_folder_that_is_missing_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match=f"cannot write {tmp_path}/gone/model-00001"):
        ShardWriter(tmp_path / "gone", layout_of(tensors))


def test_a_folder_that_another_machine_does_not_see_is_told_from_a_file(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    writer = ShardWriter(work, layout_of(tensors))
    work.rename(elsewhere)
    said = advice("Choose an output in one; of an output on a URL set COVMERGE_CACHE to one")
    with pytest.raises(InputError, match=f"no {work} on .*{said}"):
        writer.write("a", tensors["a"])
    work.mkdir()
    with pytest.raises(InputError, match=f"cannot write {work}/model-00001"):
        writer.write("a", tensors["a"])
    work.rmdir()
    work.symlink_to(elsewhere)  # the folder that both see
    writer.write("a", tensors["a"])
