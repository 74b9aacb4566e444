"""Adapters that AdapterHub's library wrote, with what it computes: tests/golden/adapterhub.

    VENV/bin/python -P lab/benchmarks/adapterhub.py FOLDER

VENV has `adapters==1.3.0`, which needs another transformers than covmerge's own environment. A test merges
the adapters into the base, and compares the outputs with those that the library computed unmerged. `merged`
is the LoRA as the library merges it, which is a full model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 12,
    "max_position_embeddings": 12,
}


def main(folder: Path) -> None:
    import adapters  # the environment has it that this is run in
    import transformers

    hub: Any = adapters
    torch.manual_seed(0)
    base: Any = transformers.BertModel(transformers.BertConfig(**SIZES))
    for name, tensor in base.named_parameters():
        if name.endswith("bias"):
            tensor.data.normal_(0, 0.5)
    base.save_pretrained(folder / "base")
    kinds = {
        "lora": hub.LoRAConfig(r=2, alpha=6, intermediate_lora=True, output_lora=True),
        "ia3": hub.IA3Config(),
    }
    words, outputs = torch.arange(10)[None], dict[str, torch.Tensor]()
    for kind, config in kinds.items():
        model: Any = hub.AutoAdapterModel.from_pretrained(folder / "base")
        model.add_adapter(kind, config=config)
        for name, tensor in model.named_parameters():
            if ".loras." in name:
                tensor.data += 0.005 * torch.randn_like(tensor)
        model.set_active_adapters(kind)
        model.save_adapter(folder / kind, kind)
        outputs[kind] = model.double().eval()(words).last_hidden_state.detach()
    model = hub.AutoAdapterModel.from_pretrained(folder / "base")
    name = model.load_adapter(str(folder / "lora"))
    model.merge_adapter(name)
    model.delete_adapter(name)
    model.save_pretrained(folder / "merged")
    save_file(outputs, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
