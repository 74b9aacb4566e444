"""What one of several processes saves of its shards; by itself, so that these import nothing else."""

from multiprocessing import get_context
from pathlib import Path

import torch

MATRIX = torch.arange(35.0).reshape(7, 5)


def write_all(folder: str) -> None:
    """All of it, by processes forked off one that has imported what they share."""
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    fork = get_context("fork")
    started = [fork.Process(target=write_shards, args=(n, f"{folder}/shards")) for n in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    write_ranks(folder)


def write_shards(rank: int, folder: str) -> None:
    """What one of four processes saves: rows, columns, both, copies; by DCP, and in files of its own."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.sharded_tensor import Shard as Shard1
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}-meet", rank=rank, world_size=4)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    two = (_StridedShard(0, split_factor=2), Shard(0))  # as FSDP2 over tensor parallelism
    kinds = {
        "rows": (line, [Shard(0)]),  # 2, 2, 2 and 1 of 7
        "columns": (line, [Shard(1)]),  # 2, 2, 1 and none of 5
        "blocks": (grid, [Shard(0), Shard(1)]),
        "half": (grid, [Replicate(), Shard(1)]),
        "whole": (line, [Replicate()]),
        "strided": (grid, two),
    }
    own = {
        name: distribute_tensor(MATRIX, *kind, src_data_rank=None) for name, kind in kinds.items()
    }
    dcp.save({"model": own}, checkpoint_id=folder)
    parts = {name: 1 + (name == "rows") for name in own}
    dcp.save(
        own, storage_writer=HuggingFaceStorageWriter(f"{folder}-hf", parts, save_distributed=True)
    )
    # What DCP does not save: rows that do not lie together, and axes in another order.
    apart = distribute_tensor(MATRIX, grid, [two[0], Replicate()], src_data_rank=None)
    spec = DTensorSpec(grid, (Shard(0), Shard(0)), TensorMeta(MATRIX.shape, (5, 1), MATRIX.dtype))
    spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    turned = DTensor(own["strided"].to_local(), spec, requires_grad=False)
    # As FSDP1 does, of four ranks the last with none of the rows.
    rows = [(3 * n, part) for n, part in enumerate(MATRIX.chunk(3))][rank : rank + 1]
    places = [ShardMetadata([at, 0], [*part.shape], f"rank:{rank}/cpu") for at, part in rows]
    shards = [Shard1(part, place) for (_, part), place in zip(rows, places, strict=True)]
    sharded = ShardedTensor._init_from_local_shards(shards, *MATRIX.shape)
    own |= {"apart": apart, "turned": turned, "sharded": sharded}
    Path(f"{folder}-ranks").mkdir(exist_ok=True)
    plain = {"buffer": torch.arange(3), "count": torch.tensor(3)}
    torch.save({**own, **plain}, f"{folder}-ranks/model_world_size_4_rank_{rank}.pt")
    dist.destroy_process_group()


def write_ranks(folder: str) -> None:
    """What each of some ranks saves of DTensors, by one process that poses as each of them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = list(MATRIX.chunk(3))
    cases = {
        "rows": (rows, Shard(0)),
        "copies": ([MATRIX] * 2, Replicate()),
        "other": ([MATRIX, MATRIX + 1], Replicate()),
        "summed": (rows, Partial()),
        "strewn": (rows, _StridedShard(0, split_factor=9)),
        "short": ([rows[0], rows[1], rows[0]], Shard(0)),
        "typed": ([*rows[:2], rows[2].double()], Shard(0)),
    }
    for name, (parts, placement) in cases.items():
        Path(folder, name).mkdir()
        for rank, part in enumerate(parts):
            mesh = init_device_mesh("cpu", (1,))
            mesh._coordinate_on_dim = (rank,)
            whole = DTensor.from_local(
                part.clone(), mesh, [placement], run_check=False, shape=(7, 5), stride=(5, 1)
            )
            file = Path(folder, name, f"model_world_size_{len(parts)}_rank_{rank}.pt")
            torch.save({"w": whole, "same": torch.ones(1)}, file)
    dist.destroy_process_group()
