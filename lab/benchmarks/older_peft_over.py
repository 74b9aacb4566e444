"""Adapters of one PEFT over Llamas in full precision: run by that PEFT, without covmerge.

    python older_peft_over.py BASES OUT

BASES/*-plain are what libraries dequantised. For each of them and each case it writes a folder with the
adapter, and the weights that its layers compute with, in float64: what they give for each unit vector.
"""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

LAYERS = ["q_proj", "down_proj"]
CASES = {
    "LORA": {"r": 2, "lora_alpha": 3},
    "LORA, use_rslora": {"r": 2, "use_rslora": True},
    "LORA, use_dora": {"r": 2, "use_dora": True},
    "LORA, pissa": {"r": 2, "init_lora_weights": "pissa"},
    "ADALORA": {"init_r": 3, "target_r": 2, "lora_alpha": 4, "total_step": 100},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LOHA": {"r": 2, "alpha": 3},
    "LOKR": {"r": 1, "alpha": 3},
    "OFT": {"r": 4},
    "HRA": {"r": 2},
    "VERA": {"r": 3},
}


def weight_of(layer):
    """What a layer multiplies by."""
    count = layer.base_layer.in_features
    given = layer(torch.eye(count, dtype=torch.float64)) - layer(
        torch.zeros(1, count, dtype=torch.float64)
    )
    return given.T.contiguous()


def main(plain, out):
    """Draw and save an adapter of each type that this version has."""
    base = AutoModelForCausalLM.from_pretrained(plain, torch_dtype=torch.float32)
    out.mkdir(parents=True)
    told = {}
    for number, (what, fields) in enumerate(CASES.items()):
        kind = what.partition(",")[0]
        if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
            continue
        torch.manual_seed(0)
        try:
            config_of = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
            if kind == "OFT" and "oft_block_size" in config_of.__dataclass_fields__:
                fields = {"oft_block_size": 0, **fields}
            config = config_of(target_modules=LAYERS, task_type="CAUSAL_LM", **fields)
            model = get_peft_model(copy.deepcopy(base), config)
            draw = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
            model.save_pretrained(str(out / str(number)))
            loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(out / str(number)))
            layers = loaded.double().eval().base_model.model.named_modules()
            weights = {
                f"{name}.weight": weight_of(layer)
                for name, layer in layers
                if name.endswith(tuple(LAYERS))
            }
        except Exception as failure:
            told[what] = f"{type(failure).__name__}: {failure}"[:160]
            continue
        save_file(weights, out / str(number) / "weights.safetensors")
        told[what] = str(number)
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        for folder in sorted(Path(sys.argv[1]).glob("*-plain")):
            main(folder, Path(sys.argv[2]) / folder.name.removesuffix("-plain"))
