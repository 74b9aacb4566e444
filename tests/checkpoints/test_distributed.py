"""Folders of torch.distributed.checkpoint, written by torch itself: by one process, and by several."""

import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.distributed import METADATA
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.trainer import last_steps
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import parse_recipe
from tests.advised import advice
from tests.checkpoints.shards import MATRIX, write_all
from tests.forked import SERVER

# 2-d, 1-d, scalar, empty; of several dtypes
STATE = {
    "w": MATRIX,
    "b": torch.arange(7).to(torch.bfloat16),
    "small": MATRIX.to(torch.float8_e4m3fn),
    "step": torch.tensor(3),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "turned": torch.arange(12.0).reshape(3, 4).T,
}


def save(content: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(content, storage_writer=filesystem.FileSystemWriter(folder, **options))
    return folder


def equals(folder: Path, state: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.headers) == set(state)
    for name, value in state.items():
        found = checkpoint.read(name)
        assert found.dtype == value.dtype and found.is_contiguous() and torch.equal(found, value)
        if value.ndim:
            for start, stop in ((0, 0), (1, len(value)), (len(value) // 2, len(value))):
                if start <= stop:
                    assert torch.equal(checkpoint.read(name, range(start, stop)), value[start:stop])


def test_a_state_dict_by_itself(tmp_path: Path) -> None:
    equals(save(STATE, tmp_path / "plain"), STATE)
    plain = {name: value.contiguous() for name, value in STATE.items() if name != "step"}
    style = filesystem.SerializationFormat.SAFETENSORS
    equals(save(plain, tmp_path / "safe", serialization_format=style), plain)


@pytest.mark.parametrize("consolidated", [False, True])
def test_files_of_its_hugging_face_writer(tmp_path: Path, consolidated: bool) -> None:
    """Of one process: an index beside one file, whose header speaks of shards."""
    state = {"w": MATRIX, "b": torch.arange(7).to(torch.bfloat16)}
    writer = dcp.HuggingFaceStorageWriter(
        path=str(tmp_path),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=consolidated,
        enable_consolidation=consolidated,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(state, storage_writer=writer)
    equals(tmp_path, state)


def test_a_model_beside_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    for number, saved in enumerate((content, {"app": content})):
        folder = save(saved, tmp_path / str(number))
        equals(folder, model.state_dict())
        assert "the 4 tensors under" in open_checkpoint(folder).notes[0]
    with pytest.raises(
        CheckpointError, match=r"tensors under 'a', 'b', and none of these is called"
    ):
        open_checkpoint(save({"a": {"w": STATE["w"]}, "b": {"w": STATE["w"]}}, tmp_path / "two"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What several processes write; nobody changes it."""
    folder = tmp_path_factory.mktemp("written")
    process = SERVER.Process(target=write_all, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder


@pytest.mark.slow
def test_shards_of_four_processes(written: Path) -> None:
    folder = written / "shards"
    assert len(list(folder.glob("*.distcp"))) == 4
    right = dict.fromkeys(("rows", "columns", "blocks", "half", "whole", "strided"), MATRIX)
    equals(folder, right)
    equals(written / "shards-hf", right)
    equals(
        written / "shards-ranks",
        {
            **right,
            "apart": MATRIX,
            "turned": MATRIX,
            "sharded": MATRIX,
            "buffer": torch.arange(3),
            "count": torch.tensor(3),
        },
    )
    file = written / "shards-ranks" / "model_world_size_4_rank_0.pt"
    with zipfile.ZipFile(file) as archive:
        members = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in members.items():
            archive.writestr(entry, data.replace(b"shard_offsets", b"shard_0ffsets"))
    said = advice("is a ShardedTensor without a shape or dtype, or with a shard that does not fit")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(file.parent)


def test_a_run_of_such_checkpoints_is_averaged(tmp_path: Path) -> None:
    states = [{"fc.weight": torch.full((4, 3), float(n))} for n in (1, 2, 6)]
    for number, state in enumerate(states, 1):
        folder = tmp_path / "titan" / f"step-{number}00"
        save(state, folder)
        trained = tmp_path / "trainer" / f"checkpoint-{number}00"
        save({"model": state}, trained / "pytorch_model_fsdp_0")
        save({"optimizer": {"x": torch.ones(2)}}, trained / "optimizer_0")
        (trained / "trainer_state.json").write_text("{}")
        torch.save({}, trained / "scheduler.pt")
    for run in ("titan", "trainer"):
        steps = last_steps(run, 2, tmp_path)
        assert [step.step for step in steps] == [200, 300]
        assert not any("pytorch_model_fsdp_0" in step.own for step in steps)
        recipe = parse_recipe({"run": {"folder": str(tmp_path / run), "last": 2}})
        merged = run_recipe(recipe, tmp_path / f"{run}-out")
        assert merged.verification is not None and merged.verification.ok
        found = open_checkpoint(tmp_path / f"{run}-out").read("fc.weight")
        assert torch.equal(found, torch.full((4, 3), 4.0))
    (tmp_path / "titan" / "step-300" / METADATA).unlink()  # which is written last
    with pytest.raises(CheckpointError, match=r"step-300 is incomplete"):
        last_steps("titan", 2, tmp_path)


def test_other_weights_beside_it_have_precedence(tmp_path: Path) -> None:
    folder = save({"model": STATE}, tmp_path / "checkpoint")
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    assert list(open_checkpoint(folder).headers) == ["x"]


def test_blocks_are_put_together(tmp_path: Path) -> None:
    blocks = {f"{r}{c}": MATRIX[r : r + 4, c : c + 3].clone() for r in (0, 4) for c in (0, 3)}
    folder = save({**blocks, "other": torch.ones(2)}, tmp_path / "blocks")

    def join(metadata: Metadata) -> None:
        boxes = {
            name: ((int(name[0]), int(name[1])), block.shape) for name, block in blocks.items()
        }
        for name, (offsets, _) in boxes.items():
            of_block = metadata.storage_data.pop(MetadataIndex(name, torch.Size([0, 0])))
            metadata.storage_data[MetadataIndex("w", torch.Size(offsets))] = of_block
            del metadata.state_dict_metadata[name]
        stored = [chunk(*box) for box in boxes.values()]
        kind = TensorProperties(torch.float32)
        metadata.state_dict_metadata["w"] = TensorStorageMetadata(kind, MATRIX.shape, stored)
        metadata.planner_data = None

    equals(spoil(folder, join), {"w": MATRIX, "other": torch.ones(2)})


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/covmerge-was-here",)


def spoil(folder: Path, change: Any) -> Path:
    """A copy with other metadata."""
    spoilt = folder.with_name("spoilt")
    shutil.rmtree(spoilt, ignore_errors=True)
    shutil.copytree(folder, spoilt)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    changed = change(metadata)
    (spoilt / METADATA).write_bytes(pickle.dumps(metadata if changed is None else changed))
    return spoilt


def chunk(*box: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))


def test_what_a_stranger_may_have_written(tmp_path: Path) -> None:
    folder = save({"w": STATE["w"], "v": STATE["w"] + 1}, tmp_path / "good")

    def declare(size: tuple[int, ...], *chunks: ChunkStorageMetadata, dtype=torch.float32) -> Any:
        def change(metadata: Metadata) -> None:
            stored = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), list(chunks))
            metadata.state_dict_metadata["w"] = stored
            old = metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
            for one in chunks:
                metadata.storage_data[MetadataIndex("w", one.offsets)] = old

        return change

    def place(**changes: Any) -> Any:
        def change(metadata: Metadata) -> None:
            vars(metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]).update(changes)

        return change

    def elsewhere(metadata: Metadata) -> None:
        of_v = metadata.storage_data[MetadataIndex("v", torch.Size([0, 0]))]
        metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))] = of_v

    def hostile(metadata: Metadata) -> None:
        metadata.planner_data = Hostile()

    cases = {
        "the 1 pieces of 'w' do not make up": declare((8, 5), chunk((0, 0), (7, 5))),
        "the 2 pieces of 'w' do not make up": declare(
            (7, 5), chunk((0, 0), (4, 5)), chunk((3, 0), (4, 5))
        ),
        advice("that is not in it, or is in no file: fetch the files again"): declare(
            (7, 5), chunk((1, 0), (7, 5))
        ),
        advice("which is {} bytes long: it was cut short, fetch it again"): declare(
            (700, 5000), chunk((0, 0), (700, 5000))
        ),
        "is longer than any can be": declare((2**40, 2**40), chunk((0, 0), (7, 5))),
        "is longer than any": declare((0, 2**40, 2**40), chunk((0, 0, 0), (0, 2**40, 2**40))),
        "no dense tensor of a dtype": declare((7, 5), chunk((0, 0), (7, 5)), dtype=torch.qint8),
        advice("that they have the same bytes of {}: fetch the files again"): elsewhere,
        "only bare names": place(relative_path="../good/__0_0.distcp"),
        advice("{} has {} where sizes should be: fetch it again"): place(offset=-1),
        "by an extension of torch's": place(transform_descriptors=["zstd"]),
        advice("{} has a {} where DCP has a {}: fetch it again, or {}"): lambda _: {},
        "has no state_dict_metadata": lambda _: Metadata(state_dict_metadata=None),  # type: ignore[arg-type]
        "has a Hostile|has a mkdir where DCP has": lambda _: Hostile(),
    }
    for message, change in cases.items():
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(spoil(folder, change))
    assert open_checkpoint(spoil(folder, hostile)).read("w").shape == (7, 5)
    style = filesystem.SerializationFormat.SAFETENSORS
    safe = save({"w": STATE["w"]}, tmp_path / "safe", serialization_format=style)
    twice = declare((14, 5), chunk((0, 0), (7, 5)), chunk((7, 0), (7, 5)))
    said = advice(
        "of two chunks of '{}' that they are the same tensor of a file: fetch the files ag"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(spoil(safe, twice))
    for again in (folder, safe):
        assert torch.equal(open_checkpoint(again).read("w"), STATE["w"])
    assert not Path("/tmp/covmerge-was-here").exists()


def test_files_that_are_not_what_the_metadata_says(tmp_path: Path) -> None:
    folder = save({"w": STATE["w"]}, tmp_path / "good")
    data = (folder / "__0_0.distcp").read_bytes()
    checkpoint = open_checkpoint(folder)
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        checkpoint.read("w")
    (folder / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cut short, fetch it again"):
        open_checkpoint(folder)
    other = save({"w": STATE["w"].to(torch.float64)[:4]}, tmp_path / "other")
    shutil.copy(other / "__0_0.distcp", folder)
    with pytest.raises(CheckpointError, match=r"cut short|files are of different checkpoints"):
        open_checkpoint(folder).read("w")
    other = save({"w": STATE["w"] > 0, "v": STATE["w"]}, tmp_path / "typed") / "__0_0.distcp"
    (folder / "__0_0.distcp").write_bytes(other.read_bytes())
    said = advice("as {} says: the files are of different checkpoints, fetch them again")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder).read("w")
    (folder / "__0_0.distcp").write_bytes(data + bytes(99))
    equals(folder, {"w": STATE["w"]})
    os.truncate(folder / "__0_0.distcp", 2**40)  # whose hash would take hours
    said = advice("{} has {} bytes, and {} names none after the first {}: fetch the files again")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder)
    (folder / "__0_0.distcp").write_bytes(data)
    equals(folder, {"w": STATE["w"]})
    (folder / "__0_0.distcp").write_bytes(data[:200] + b"\xff" * (len(data) - 200))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'w' cannot be read as"):
        open_checkpoint(folder).read("w")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        open_checkpoint(folder)
    (folder / METADATA).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read as metadata"):
        open_checkpoint(folder)


def test_local_states_of_fsdp_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"pytorch_model_fsdp_rank{rank}.bin").write_bytes(b"")
    said = advice(
        "load it where it was trained, and pass what fsdp_state_dict_type SHARDED_STATE_DICT saves"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)
    save(
        {"model": {"w": MATRIX}}, tmp_path / "new" / "pytorch_model_fsdp_0"
    )  # as accelerate does then
    equals(tmp_path / "new", {"w": MATRIX})


def test_files_of_ranks(written: Path, tmp_path: Path) -> None:
    """As verl saves FSDP's state; torch.chunk gives three ranks 3, 3 and 1 of 7 rows."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    same = torch.ones(1)
    equals(tmp_path / "rows", {"w": MATRIX, "same": same})
    equals(tmp_path / "copies", {"w": MATRIX, "same": same})
    base = {"w": 2 * MATRIX, "same": same}
    merged = covmerge.merge(base, {"a": tmp_path / "rows"}, "average").tensors
    assert torch.equal(merged["w"], MATRIX)
    refused = {
        "summed": "has the placement Partial, and Shard of one",
        "strewn": "of shape [7, 5] would be in more pieces than there are ranks (3)",
        "short": "has the local shape [3, 5] in",
        "typed": "another shape, dtype or sharding",
    }
    for name, message in refused.items():
        with pytest.raises(CheckpointError, match=re.escape(message)):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="has other values of 'w' than"):
        open_checkpoint(tmp_path / "other").read("w")
    folder = tmp_path / "rows"
    last = folder / "model_world_size_3_rank_2.pt"
    last.rename(folder / "model_world_size_4_rank_3.pt")
    with pytest.raises(CheckpointError, match="files of 3 and of 4 ranks"):
        open_checkpoint(folder)
    (folder / "model_world_size_4_rank_3.pt").unlink()
    with pytest.raises(CheckpointError, match="2 files of 3 ranks, and none of rank 2"):
        open_checkpoint(folder)
    torch.save({"w": MATRIX, "same": nn.Linear(2, 2)}, last)
    with pytest.raises(CheckpointError, match=r"rank_2.pt: tensor 'same' is a Linear, and neither"):
        open_checkpoint(folder)


def test_slices_of_safetensors(tmp_path: Path) -> None:
    """The layout of torch's HuggingFaceStorageWriter, and what is not as its header says."""

    def write(name: str, *offsets: Any) -> Path:
        (tmp_path / name).mkdir()
        for rank, (part, offset) in enumerate(zip(MATRIX.split(4), offsets, strict=True), 1):
            file = tmp_path / name / f"shard-0000{rank}-model-00001-of-00001.safetensors"
            about = json.dumps({"w": {"saved_offsets": offset}} if offset else {})
            save_file({"w": part.contiguous()}, file, metadata={"DCP_SHARDING_INFO": about})
        return tmp_path / name

    equals(write("right", [0, 0], [4, 0]), {"w": MATRIX})
    for offset in ([3, 0], [5, 0], [0, 0], [4, 1], [2**61, 0]):
        said = advice(
            "do not make up its shape {}: a file is missing or of another checkpoint, fetch"
        )
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(write(f"apart-{offset}", [0, 0], offset))
    for offset in ([4], [4, -1], [4, True], None):
        with pytest.raises(CheckpointError, match="not an offset for each axis"):
            open_checkpoint(write(f"unknown-{offset}", [0, 0], offset))
    equals(tmp_path / "right", {"w": MATRIX})


def zero3(folder: Path, world: int, trained: dict[str, Any], **others: Any) -> Path:
    """As DeepSpeed 0.19.8 saves it, with the optimizer's tensors in two flat groups of each rank."""
    step = folder / "global_step2"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")

    def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % world))
        return tuple(part.clone() for part in padded.chunk(world))

    frozen, buffers = others.get("frozen", {}), others.get("buffers", {})
    for rank in range(world):
        flat = torch.cat([parts(tensor)[rank] for tensor in trained.values()])
        groups = [flat[:4].clone(), flat[4:].clone()]
        groups[0].ds_id = "0_5"
        optimizer = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": groups}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer}, step / f"bf16_{name}_optim_states.pt")
        state = {
            "module": {**buffers, **{n: torch.empty(0) for n in trained}},
            "buffer_names": list(buffers),
            "param_shapes": [{n: t.shape for n, t in trained.items()}],
            "frozen_param_shapes": {n: t.shape for n, t in frozen.items()},
            "frozen_param_fragments": {n: parts(t)[rank] for n, t in frozen.items()},
            "shared_params": others.get("shared", {}),
        }
        torch.save(state, step / f"{name}_model_states.pt")
    return folder


def test_zero3_of_deepspeed(tmp_path: Path) -> None:
    trained = {"w": MATRIX, "b": torch.arange(2.0), "x": torch.randn(2, 3, 4)}
    frozen = {"f": torch.randn(3, 3).to(torch.bfloat16)}
    buffers = {"scale": torch.tensor(3), "table": torch.arange(4)}
    others = {"frozen": frozen, "buffers": buffers, "shared": {"head": "w"}}
    folder = zero3(tmp_path / "run" / "checkpoint-2", 3, trained, **others)
    right = {**trained, **frozen, **buffers, "head": MATRIX}
    equals(folder, right)
    equals(folder / "global_step2", right)
    save_file({"w": 2 * MATRIX}, folder / "gathered.safetensors")
    equals(folder, {"w": 2 * MATRIX})
    (folder / "gathered.safetensors").unlink()
    (folder / "trainer_state.json").write_text("{}")
    (step,) = last_steps("run", None, tmp_path)
    assert "global_step2" not in step.own
    own = folder / "global_step2"
    optim = own / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(optim, weights_only=True)
    for change, message in (
        ({"partition_count": 4}, "is of 4 ranks, and the folder has files of 3"),
        ({"fp32_flat_groups": [torch.zeros(4)]}, "parameters of 21 numbers a rank, and"),
        ({"fp32_flat_groups": [torch.zeros(21).half()]}, "not in float32, or share their bytes"),
        ({"fp32_flat_groups": [torch.zeros(1000)] * 99}, "not in float32, or share their bytes"),
        ({"fp32_flat_groups": [3]}, "holds no flat tensor where ZeRO has one"),
    ):
        torch.save({"optimizer_state_dict": content["optimizer_state_dict"] | change}, optim)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    optim.unlink()
    with pytest.raises(CheckpointError, match=r"has no \*_rank_1_mp_rank_00_optim_states.pt"):
        open_checkpoint(folder)
    (folder / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(folder)


def zero2(folder: Path, world: int, *trained: dict[str, torch.Tensor], pads: int = 0) -> Path:
    """As DeepSpeed 0.19.8 saves stages 1 and 2: a vector for each group, and one file of the model."""
    step = folder / "global_step2"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    frozen, buffer = torch.randn(3, 3).to(torch.bfloat16), torch.arange(4)
    half = {n: t.to(torch.bfloat16) for group in trained for n, t in group.items()}
    state = {
        "module": {**half, "f": frozen, "table": buffer, "head": half["w"]},
        "buffer_names": ["table"],
        "param_shapes": [{n: t.shape for n, t in group.items()} for group in trained],
        "frozen_param_shapes": {"f": frozen.shape},
        "frozen_param_fragments": {"f": frozen},
        "shared_params": {"head": "w"},
    }
    torch.save(state, step / "mp_rank_00_model_states.pt")
    vectors: list[tuple[torch.Tensor, ...]] = []
    for group in trained:
        parts = [torch.nn.functional.pad(tensor.flatten(), (0, pads)) for tensor in group.values()]
        flat = torch.cat(parts)
        vectors.append(torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * world))).chunk(world))
    for rank in range(world):
        optimizer = {
            "zero_stage": 2,
            "partition_count": [world] * len(trained),
            "single_partition_of_fp32_groups": [vector[rank].clone() for vector in vectors],
            "param_alignment_paddings": [[pads] * len(group) for group in trained],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, step / name)
    return folder


@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_earlier_stages_of_deepspeed(tmp_path: Path, world: int, pads: int) -> None:
    groups = {"w": MATRIX, "x": torch.randn(2, 3, 4)}, {"b": torch.arange(2.0)}
    folder = zero2(tmp_path / "run" / "checkpoint-2", world, *groups, pads=pads)
    state = loaded(folder / "global_step2", "mp_rank_00_model_states.pt")
    frozen, table = state["module"]["f"], state["module"]["table"]
    right = {**groups[0], **groups[1], "f": frozen, "table": table, "head": MATRIX}
    equals(folder, right)
    equals(folder / "global_step2", right)
    (folder / "trainer_state.json").write_text("{}")
    (step,) = last_steps("run", None, tmp_path)
    assert "global_step2" not in step.own
    own = folder / "global_step2"
    optim = own / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(optim, weights_only=True)["optimizer_state_dict"]
    parts = content["single_partition_of_fp32_groups"]
    for change, message in (
        (
            {"partition_count": [4, 4]},
            rf"is of \[4, 4\] ranks, and the folder has files of {world}",
        ),
        (
            {"single_partition_of_fp32_groups": parts[:1]},
            "has 2 groups of parameters, and the ranks",
        ),
        (
            {"single_partition_of_fp32_groups": [torch.cat([part] * 2) for part in parts]},
            "names parameters of .* numbers, and the ranks have",
        ),
        ({"single_partition_of_fp32_groups": [part.half() for part in parts]}, "not in float32"),
        ({"param_alignment_paddings": [[0]]}, "has parameters without paddings, or the reverse"),
    ):
        torch.save({"optimizer_state_dict": content | change}, optim)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    optim.unlink()
    with pytest.raises(CheckpointError, match=r"rank_0_mp_rank_00_optim|holds no weights"):
        open_checkpoint(folder)


SLICE = "shard-0000{}-model-0000{}-of-0000{}.safetensors"
RANK, OPTIM = "model_world_size_3_rank_2.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def write_slices(folder: Path) -> None:
    folder.mkdir()
    for rank, part in enumerate(MATRIX.split(4), 1):
        write_slice(folder / SLICE.format(rank, 1, 1), part, [4 * (rank - 1), 0])


def write_slice(file: Path, part: torch.Tensor, offset: list[int] | None) -> None:
    about = json.dumps({"w": {"saved_offsets": offset}})
    save_file(
        {"w": part.contiguous()},
        file,
        metadata=None if offset is None else {"DCP_SHARDING_INFO": about},
    )


def write_zero3(folder: Path) -> None:
    zero3(folder.parent / "zero3", 3, {"w": MATRIX})
    shutil.copytree(folder.parent / "zero3" / "global_step2", folder)


def loaded(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=True)


def other_shapes(folder: Path) -> None:
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torch.save(loaded(folder, name) | {"param_shapes": [{"v": torch.Size([35])}]}, folder / name)


def other_ranks(folder: Path) -> None:
    state = loaded(folder, OPTIM)["optimizer_state_dict"] | {"partition_count": 4}
    torch.save({"optimizer_state_dict": state}, folder / OPTIM)


def no_flat_tensor(folder: Path) -> None:
    state = loaded(folder, OPTIM)["optimizer_state_dict"] | {"fp32_flat_groups": [3]}
    torch.save({"optimizer_state_dict": state}, folder / OPTIM)


AGAIN = [
    (
        RANK,
        lambda f: torch.save([1], f / RANK),
        advice("{} holds no state dict: fetch it again, or {}"),
    ),
    (
        RANK,
        lambda f: torch.save({"v": torch.ones(1)}, f / RANK),
        advice("they are of different checkpoints, fetch them again"),
    ),
    (
        RANK,
        lambda f: torch.save({"w": MATRIX.double(), "same": torch.ones(1)}, f / RANK),
        advice("{}: the files are of different checkpoints, fetch them again"),
    ),
    (
        RANK,
        lambda f: (f / RANK).unlink(),
        advice("fetch the missing files, every rank has a part of the model"),
    ),
    (
        RANK,
        lambda f: shutil.copy(f / RANK, f / "model_world_size_4_rank_3.pt"),
        advice("ranks: they are of different checkpoints, move one of these to another folder"),
    ),
    (
        RANK,
        lambda f: torch.save({"w": MATRIX, "same": nn.Linear(2, 2)}, f / RANK),
        advice(
            "gather the model where it was trained (verl: python -m verl.model_merger merge), and pass that"
        ),
    ),
    (
        SLICE,
        lambda f: write_slice(f / SLICE.format(2, 2, 2), MATRIX, [0, 0]),
        advice("and {}: they are of different checkpoints, move one of these to another folder"),
    ),
    (
        SLICE,
        lambda f: write_slice(f / SLICE.format(2, 1, 1), MATRIX[4:], None),
        advice("fetch it again, or save it again with torch's HuggingFaceStorageWriter"),
    ),
    (
        SLICE,
        lambda f: write_slice(f / SLICE.format(2, 1, 1), MATRIX[4:], [4]),
        advice("not an offset for each axis: save the checkpoint again"),
    ),
    (
        SLICE,
        lambda f: write_slice(f / SLICE.format(2, 1, 1), MATRIX[4:].double(), [4, 0]),
        advice(
            "number of axes than in the files before it: the files are of different checkpoints, fetch"
        ),
    ),
    (
        OPTIM,
        other_shapes,
        advice("{} has other parameters or shapes than {}: they are of different"),
    ),
    (
        OPTIM,
        other_ranks,
        advice("files are missing, or of different checkpoints, fetch them again"),
    ),
    (
        OPTIM,
        lambda f: (f / OPTIM).unlink(),
        advice("fetch the missing files, as every rank has a part of the model"),
    ),
    (
        OPTIM,
        lambda f: shutil.copy(f / OPTIM, f / OPTIM.replace("rank_00", "rank_01")),
        advice("load it where it was trained, and save the model there"),
    ),
    (
        OPTIM,
        no_flat_tensor,
        advice("own script: python zero_to_fp32.py FOLDER NEW, and pass NEW"),
    ),
]


def test_the_shards_of_trainers_as_they_are_advised(written: Path, tmp_path: Path) -> None:
    """Fetched again, moved away, or gathered to one file: each ends with the model."""
    write_slices(tmp_path / "slices")
    write_zero3(tmp_path / "zero")
    intact = {RANK: written / "rows", SLICE: tmp_path / "slices", OPTIM: tmp_path / "zero"}
    for number, (kind, damage, said) in enumerate(AGAIN):
        folder = shutil.copytree(intact[kind], tmp_path / f"spoilt{number}")
        damage(folder)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)
        if "another\\ folder" in said:
            for path in folder.iterdir():
                if not (intact[kind] / path.name).exists():
                    path.rename(tmp_path / path.name)
        elif "gather" in said or "own\\ script" in said or "there" in said:
            shutil.rmtree(folder)
            folder.mkdir()
            same = {"same": torch.ones(1)} if kind == RANK else {}
            torch.save({"w": MATRIX, **same}, folder / "pytorch_model.bin")
        else:
            shutil.rmtree(folder)
            shutil.copytree(intact[kind], folder)
        assert torch.equal(open_checkpoint(folder).read("w"), MATRIX), said
