from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from covmerge.base.types import TensorHeader
from covmerge.errors import InputError, TensorError
from covmerge.files.checkpoints.layout import SAFETENSORS_NAMES, plan_layout, plan_shard
from covmerge.files.checkpoints.writer import ShardWriter
from tests.advised import advice

F32 = torch.float32
DTYPES = sorted(SAFETENSORS_NAMES, key=str)


def header(name: str, *shape: int, dtype: torch.dtype = F32) -> TensorHeader:
    return TensorHeader(name, shape, dtype)


headers = st.lists(
    st.builds(
        TensorHeader,
        name=st.text(st.characters(codec="utf-8"), max_size=8).filter("__metadata__".__ne__),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda header: header.name,
)


@given(headers, st.integers(1, 300))
def test_shards_hold_every_tensor_once_without_holes_and_aligned(
    headers: list[TensorHeader], shard_size: int
) -> None:
    layout = plan_layout(headers, shard_size)
    assert sorted(n for s in layout.shards for n in s.entries) == sorted(h.name for h in headers)
    assert layout.data_size == sum(h.nbytes for h in headers)
    assert layout.size == sum(s.size for s in layout.shards)
    for shard in layout.shards:
        end = len(shard.header)
        assert end % 8 == 0
        for slot in shard.entries.values():
            assert slot.offset == end
            assert slot.offset % slot.header.dtype.itemsize == 0
            end += slot.nbytes
        assert shard.size == end
        filled = end - len(shard.header)
        assert filled <= shard_size or sum(s.nbytes > 0 for s in shard.entries.values()) == 1


@given(headers, st.integers(1, 300))
def test_tensors_go_to_shards_in_the_given_order(
    headers: list[TensorHeader], shard_size: int
) -> None:
    layout = plan_layout(headers, shard_size)
    number = {name: i for i, shard in enumerate(layout.shards) for name in shard.entries}
    order = [number[h.name] for h in headers]
    assert order == sorted(order)


def test_order_is_kept_among_dtypes_of_one_width() -> None:
    shard = plan_shard(
        "x.safetensors",
        [
            header("byte", 3, dtype=torch.uint8),
            header("z", 2),
            header("half", 1, dtype=torch.float16),
            header("a", 2, dtype=torch.int32),
        ],
    )
    assert list(shard.entries) == ["z", "a", "half", "byte"]


def test_one_shard_and_many_are_named_like_transformers_names_them() -> None:
    three = [header(name, 25) for name in "abc"]
    assert [s.file_name for s in plan_layout(three, 300).shards] == ["model.safetensors"]
    assert [s.file_name for s in plan_layout(three, 299).shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_tensor_larger_than_a_shard_lies_alone() -> None:
    layout = plan_layout([header("a", 1), header("large", 100), header("b", 1)], 16)
    assert [list(s.entries) for s in layout.shards] == [["a"], ["large"], ["b"]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        content = content % 2
    tensor = content.view(dtype).reshape(2, 3)
    scalar, empty = tensor[0, 1].clone(), tensor[:0]
    named = {"matrix": tensor, "scalar": scalar, "empty": empty}
    layout = plan_layout(
        [TensorHeader(n, tuple(t.shape), t.dtype) for n, t in named.items()], 10**9
    )
    writer = ShardWriter(tmp_path, layout)
    for name, value in named.items():
        writer.write(name, value)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == named.keys()
    for name, value in named.items():
        assert read[name].dtype == dtype and read[name].shape == value.shape
        same = read[name].reshape(-1).view(torch.uint8) == value.reshape(-1).view(torch.uint8)
        assert same.all()


def test_metadata_is_kept_and_says_pt(tmp_path: Path) -> None:
    layout = plan_layout([header("a", 1)], 8, metadata={"covmerge": "0.1", "plan": "ü"})
    ShardWriter(tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # pyright: ignore
        assert file.metadata() == {"covmerge": "0.1", "plan": "ü", "format": "pt"}


def test_rows_span_their_bytes() -> None:
    slot = plan_shard("x", [header("w", 4, 5), header("none", 0, 5)]).entries["w"]
    assert slot.span() == (slot.offset, 80)
    assert slot.span(range(1, 3)) == (slot.offset + 20, 40)
    assert slot.span(range(4, 4)) == (slot.offset + 80, 0)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((4, 5), range(3, 5)), ((4, 5), range(0, 4, 2)), ((4, 5), range(-1, 2)), ((), range(0, 1))],
)
def test_rows_outside_the_tensor_are_refused(shape: tuple[int, ...], rows: range) -> None:
    slot = plan_shard("x", [header("w", *shape)]).entries["w"]
    with pytest.raises(TensorError, match="'w' of shape"):
        slot.span(rows)


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(TensorError, match="no tensor"):
        plan_layout([], 100)
    with pytest.raises(InputError, match=advice("is not positive: pass a size such as 5GB")):
        plan_layout([header("a", 1)], 0)
    with pytest.raises(TensorError, match="'a' is listed twice"):
        plan_layout([header("a", 1), header("b", 9), header("a", 2)], 1)
    said = advice("a tensor is named '__metadata__', which safetensors reserves: rename it")
    with pytest.raises(TensorError, match=said):
        plan_layout([header("__metadata__", 1)], 100)
    said = advice("which safetensors cannot hold: convert it to one of {}")
    with pytest.raises(TensorError, match=f"'c' is torch.complex128, {said}"):
        plan_layout([header("c", 1, dtype=torch.complex128)], 100)
    said = advice("a name in the header of {} is not valid Unicode ({}): rename the tensor")
    with pytest.raises(TensorError, match=said):
        plan_layout([header("\ud800", 1)], 100)
    plan_layout([header("metadata", 1), header("c", 1, dtype=torch.complex64)], 5 * 10**9)


def test_a_header_that_readers_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covmerge.files.checkpoints.layout.MAX_HEADER_BYTES", 200)
    with pytest.raises(TensorError, match="smaller shard size"):
        plan_layout([header(f"tensor{i}", 1) for i in range(9)], 1000)
