"""What one of several processes saves of its shards; by itself, so that these import nothing else."""

import torch

MATRIX = torch.arange(35.0).reshape(7, 5)


def write_shards(rank: int, folder: str) -> None:
    """What one of four processes saves: rows, columns, both, copies, and a model under FSDP."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}-meet", rank=rank, world_size=4)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    kinds = {
        "rows": (line, [Shard(0)]),  # 2, 2, 2 and 1 of 7
        "columns": (line, [Shard(1)]),  # 2, 2, 1 and none of 5
        "blocks": (grid, [Shard(0), Shard(1)]),
        "half": (grid, [Replicate(), Shard(1)]),
        "whole": (line, [Replicate()]),
    }
    own = {name: distribute_tensor(MATRIX, *kind) for name, kind in kinds.items()}
    dcp.save({"model": own}, checkpoint_id=folder)
    dist.destroy_process_group()
