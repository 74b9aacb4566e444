"""Quantise a tiny model by AutoRound, and keep a layer that it saved with what it reads of it.

In an environment with torch 2.13.0, transformers 5.24.0 and auto-round 0.16.1:

    python -m tests.quantised.make_autoround_goldens
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).with_name("autoround_goldens.safetensors")
MODULE = "model.layers.0.self_attn.q_proj"
OTHER = {"layer_config": {MODULE: {"bits": 8}}}
CASES: dict[str, dict[str, Any]] = {
    **{f"auto-round {bits}": {"scheme": f"W{bits}A16", "group_size": 32} for bits in (2, 3, 4, 8)},
    "auto-round mixed": {"scheme": "W4A16", "group_size": 32, **OTHER},
    "auto-round plus": {"scheme": "W4A16", "group_size": 32, "format": "auto_round:gptqmodel"},
    "auto-round mxfp4": {"scheme": "MXFP4"},
    "auto-round nvfp4": {"scheme": "NVFP4"},
    "auto-round fp8": {"scheme": "FP8_STATIC"},
}


def of_autoround() -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Yield each case with a layer and the settings in config.json."""
    transformers: Any = importlib.import_module("transformers")
    rounding: Any = importlib.import_module("auto_round").AutoRound
    tokenizers: Any = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({f"t{n}": n for n in range(64)}, unk_token="t0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    how = {"iters": 0, "nsamples": 1, "seqlen": 8, "device_map": "cpu", "disable_opt_rtn": True}
    how["dataset"] = [torch.arange(8)[None]]  # some schemes measure activations
    for case, scheme in CASES.items():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.model.layers[0].self_attn.q_proj.weight.data.mul_(2)
        given = {key: value for key, value in scheme.items() if key != "format"}
        with TemporaryDirectory() as folder:
            wanted = scheme.get("format", "auto_round")
            rounding(model, tokenizer, **how, **given).quantize_and_save(folder, format=wanted)
            (saved,) = [path.parent for path in Path(folder).rglob("model.safetensors")]
            stored = load_file(saved / "model.safetensors")
            settings = json.loads((saved / "config.json").read_text())["quantization_config"]
            read = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
            layer = dict(read.get_submodule(MODULE).named_buffers())
            one = torch.ones(1)  # an input that no quantisation of activations rounds
            if "input_scale" in layer:
                one = layer["input_scale"].float()
            elif "input_global_scale" in layer:
                one = 6 / layer["input_global_scale"].float()
            with torch.no_grad():
                expected = (read.get_submodule(MODULE)(torch.eye(64) * one) / one).mT.contiguous()
        parts = {
            name.replace(MODULE, "fc"): tensor
            for name, tensor in stored.items()
            if name.startswith(f"{MODULE}.")
        }
        # AutoRound computes float8 weights in bfloat16.
        dtype = torch.bfloat16 if case.endswith("fp8") else torch.float16
        yield case, {**parts, "expected": expected.to(dtype)}, settings


def main() -> None:
    """Write the file of goldens, with the settings of each case as its metadata."""
    found: dict[str, Tensor] = {}
    said: dict[str, str] = {}
    for case, layer, settings in of_autoround():
        found |= {f"{case}/{name}": tensor.contiguous() for name, tensor in layer.items()}
        said[case] = json.dumps(settings, sort_keys=True)
        print(case, {name: (tuple(t.shape), t.dtype) for name, t in layer.items()}, settings)
    save_file(found, GOLDEN, metadata=said)


if __name__ == "__main__":
    main()
