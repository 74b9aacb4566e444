"""Checkpoints of torch.distributed.checkpoint by one torch: run by that torch, without covmerge.

    python older_torch.py OUT

It writes a folder for each case, OUT/expected.safetensors by the case's number, and OUT/told.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

WHOLE = torch.arange(63.0).reshape(9, 7) / 8
STATE = {
    "w": WHOLE,
    "half": WHOLE.to(torch.bfloat16),
    "small": WHOLE.to(torch.float8_e4m3fn),
    "b": torch.arange(7),
    "step": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "turned": WHOLE.T,
    "part": WHOLE[2:5],
}
PLAIN = {name: STATE[name] for name in ("w", "half", "b", "mask")}
RANKS = {"FSDP2": 2, "FSDP1, sharded state": 2, "tensor parallel": 2, "FSDP2 x tensor parallel": 4}
CASES = (
    "a state dict",
    "a model beside its optimizer",
    "async_save",
    "torch_save_to_dcp",
    "HuggingFaceStorageWriter",
    "safetensors format",
    *RANKS,
)


def net():
    """Sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def alone(case, out):
    """What one process writes, and the tensors in it."""
    if case == "a state dict":
        dcp.save(STATE, checkpoint_id=out)
        return STATE
    if case == "a model beside its optimizer":
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
        dcp.save({"app": content}, checkpoint_id=out)
        return model.state_dict()
    if case == "async_save":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
        dist.init_process_group("gloo", rank=0, world_size=1)
        dcp.async_save(PLAIN, checkpoint_id=out).result()
        dist.destroy_process_group()
        return PLAIN
    if case == "torch_save_to_dcp":
        from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

        torch.save(PLAIN, out + ".pt")
        torch_save_to_dcp(out + ".pt", out)
        return PLAIN
    if case == "HuggingFaceStorageWriter":
        writer = dcp.HuggingFaceStorageWriter(
            path=out, fqn_to_index_mapping={name: 1 + n % 2 for n, name in enumerate(PLAIN)}
        )
    else:
        style = dcp.filesystem.SerializationFormat.SAFETENSORS
        writer = dcp.FileSystemWriter(out, serialization_format=style)
    dcp.save(PLAIN, storage_writer=writer)
    return PLAIN


def together(rank, case, out):
    """What one of several ranks does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    count = RANKS[case]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29578")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    model = net()
    if case == "FSDP1, sharded state":
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
    else:
        shape = (2, 2) if count == 4 else (2,)
        names = ("data", "tensor") if count == 4 else ("tensor" if "tensor" in case else "data",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if "tensor" in names:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        if "data" in names:
            from torch.distributed._composable.fsdp import fully_shard

            fully_shard(model, mesh=mesh["data"])
        state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=out)
    dist.destroy_process_group()


def main(out):
    """Every case that this torch has."""
    told = {}
    for number, case in enumerate(CASES):
        folder = str(out / str(number))
        try:
            if case in RANKS:
                torch.multiprocessing.spawn(together, (case, folder), nprocs=RANKS[case])
                expected = net().state_dict()
            else:
                expected = alone(case, folder)
        except Exception as failure:
            told[case] = f"{type(failure).__name__}: {failure}".strip().rpartition("\n")[2][:160]
            continue
        told[case] = str(number)
        kept = {name: own.detach().clone().contiguous() for name, own in expected.items()}
        save_file(kept, out / f"{number}.safetensors")
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
