#!/usr/bin/env bash
# torch 2.13.0: safetensors shards of torch.distributed.checkpoint store offsets and no whole shapes: without the last rank's file a tensor is smaller.
#
# Expected: each file says how large the whole tensor is, as .metadata of the usual storage does; a folder
#   that was copied in part is refused.
# Seen: DCP_SHARDING_INFO has saved_offsets alone, and there is no index. The reader and
#   consolidate_safetensors_files take the largest offset + length for the shape; of 2 ranks' files the
#   first alone gives half of the rows, and the names (both end in 00001-of-00001) do not tell.
# So: keep the number of ranks beside the folder, and compare shapes with the model's.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cat > save.py <<'PY'
import json, os, pathlib, shutil, socket, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
warnings.filterwarnings("ignore")

def save(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    whole = torch.arange(12.0).reshape(6, 2)
    own = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save({"weight": own}, storage_writer=HuggingFaceStorageWriter("both", save_distributed=True))
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save, args=(port,), nprocs=2)
    files = sorted(path.name for path in pathlib.Path("both").iterdir())
    with safe_open(f"both/{files[0]}", "pt") as file:
        said = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    pathlib.Path("one").mkdir()
    shutil.copy(f"both/{files[0]}", "one")
    seen = {}
    for folder in ("both", "one"):
        known = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata["weight"].size
        pathlib.Path(f"{folder}-whole").mkdir()
        consolidate_safetensors_files(folder, f"{folder}-whole", fqn_to_index_mapping={"weight": 1})
        with safe_open(next(pathlib.Path(f"{folder}-whole").glob("*.safetensors")), "pt") as file:
            seen[folder] = tuple(known), tuple(file.get_tensor("weight").shape)
    print(files, said, "shapes read and consolidated:", seen)
    assert len(files) == 2 and said == {"weight": {"saved_offsets": [0, 0]}}, (files, said)
    assert seen == {"both": ((6, 2), (6, 2)), "one": ((3, 2), (3, 2))}, seen
PY
venv/bin/python save.py
