"""A tiny Llama as each quantising library stores it, with what the library makes of it again.

    python older_bases.py OUT

Without covmerge. It writes OUT/NAME (what is stored) and OUT/NAME-plain (dequantised, in float32) for the
libraries that are installed. GPTQ's layout is packed here: its weights are (q − z) · s of numbers drawn.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

Both = tuple[
    dict[str, Tensor], Tensor
]  # what is stored of a layer, and the weight that it stands for


def llama() -> Any:
    """The model, in float32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))


def gptq(weight: Tensor) -> Both:
    """Four bits in groups of 32, symmetric, zero points less one."""
    out, inputs = weight.shape
    groups = weight.view(out, inputs // 32, 32)
    scale = (groups.abs().amax(2) / 7).half().float()
    q = (groups / scale[..., None]).round().clamp(-8, 7) + 8
    plain = ((q - 8) * scale[..., None]).view(out, inputs)
    numbers = q.view(out, inputs).T.long()
    words = sum(numbers[place::8] << (4 * place) for place in range(8))
    zeros = torch.full((inputs // 32, out // 8), 0x77777777, dtype=torch.int64)
    stored = {
        "qweight": _word(words),
        "qzeros": _word(zeros),
        "scales": scale.T.contiguous().half(),
        "g_idx": (torch.arange(inputs) // 32).int(),
    }
    return stored, plain


def _word(numbers: Any) -> Tensor:
    return torch.from_numpy(numbers.numpy().astype(np.uint32).view(np.int32).copy())


def compressed(weight: Tensor) -> Both:
    """compressed-tensors, pack-quantized, four bits in groups of 32."""
    packing = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    groups = weight.view(weight.shape[0], -1, 32)
    scale = groups.abs().amax(2) / 7
    q = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int8).view(weight.shape)
    stored = {
        "weight_packed": packing.pack_to_int32(q, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    back = packing.unpack_from_int32(stored["weight_packed"], 4, torch.Size(weight.shape))
    return stored, (back.view(groups.shape) * scale[..., None]).view(weight.shape)


def torchao(weight: Tensor) -> Both:
    """Eight bits by row, as torchao flattens its tensors for safetensors."""
    ao = import_module("torchao.quantization")
    support = import_module("torchao.prototype.safetensors.safetensors_support")
    model: Any = torch.nn.Module()
    model.own = torch.nn.Linear(*reversed(weight.shape), bias=False)
    model.own.weight.data = weight.clone()
    ao.quantize_(model, ao.Int8WeightOnlyConfig(version=2))
    stored, _ = support.flatten_tensor_state_dict(model.state_dict())
    parts = {name.removeprefix("own."): tensor for name, tensor in stored.items()}
    return parts, model.own.weight.dequantize()


LAYERS: Mapping[str, tuple[Callable[[Tensor], Both], Mapping[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                    },
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "torchao": (
        torchao,
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"version": 2}}},
        },
    ),
}


def write(folder: Path, state: Mapping[str, Tensor], changes: Mapping[str, Any]) -> None:
    """Save tensors beside the model's config."""
    llama().save_pretrained(folder)
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def layerwise(name: str, out: Path) -> None:
    """Formats that pack one layer at a time."""
    pack, settings = LAYERS[name]
    stored: dict[str, Tensor] = {}
    plain = dict(llama().state_dict())
    for key, tensor in llama().state_dict().items():
        if "_proj" not in key:
            stored[key] = tensor
            continue
        parts, plain[key] = pack(tensor)
        stem = key.removesuffix("weight")
        stored |= {stem + part: own.contiguous() for part, own in parts.items()}
    write(out / name, stored, {"quantization_config": settings, "dtype": "float32"})
    write(out / f"{name}-plain", plain, {})


def bitsandbytes(kind: str, out: Path) -> None:
    """As transformers saves a model that it loaded with bitsandbytes."""
    functional = import_module("bitsandbytes.functional")
    llama().save_pretrained(out / "whole")
    how: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    settings = BitsAndBytesConfig(**how, bnb_4bit_use_double_quant=kind == "nf4")
    model = AutoModelForCausalLM.from_pretrained(
        out / "whole", quantization_config=settings, dtype=torch.float32
    )
    model.save_pretrained(out / f"bitsandbytes-{kind}")
    plain = dict(llama().state_dict())
    for name, module in model.named_modules():
        if hasattr(module, "weight") and hasattr(module.weight, "quant_state"):
            weight = module.weight
            plain[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
    write(out / f"bitsandbytes-{kind}-plain", {n: t.contiguous() for n, t in plain.items()}, {})


def gguf_file(kind: str, out: Path) -> None:
    """As the package gguf quantises, with llama.cpp's names and order of q and k."""
    gguf = import_module("gguf")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    own = gguf.GGMLQuantizationType[kind]
    folder = out / f"gguf-{kind}"
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for add, value in (
        ("block_count", 1),
        ("context_length", 32),
        ("embedding_length", 64),
        ("feed_forward_length", 128),
        ("head_count", 4),
        ("head_count_kv", 2),
        ("vocab_size", 64),
        ("rope_freq_base", 10000.0),
        ("layer_norm_rms_eps", 1e-6),
    ):
        getattr(writer, f"add_{add}")(value)
    plain = dict(llama().state_dict())
    for name, tensor in llama().state_dict().items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        place = name.removeprefix("model.layers.0.").removesuffix(".weight")
        whole = {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
            "lm_head": "output",
        }
        stored = f"blk.0.{names[place]}" if place in names else whole[place]
        array = tensor.numpy()
        if heads:
            array = array.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(array.shape)
        if "_proj" not in name:
            writer.add_tensor(f"{stored}.weight", array)
            continue
        packed = gguf.quants.quantize(array, own)
        back = gguf.quants.dequantize(packed, own).reshape(array.shape)
        if heads:
            back = back.reshape(heads, -1, 2, 64).swapaxes(1, 2).reshape(array.shape)
        plain[name] = torch.from_numpy(back.copy())
        writer.add_tensor(f"{stored}.weight", packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write(out / f"gguf-{kind}-plain", plain, {})
    config = json.loads((out / f"gguf-{kind}-plain" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    place = Path(sys.argv[1])
    for name in LAYERS:
        layerwise(name, place)
    for kind in ("nf4", "fp4"):
        bitsandbytes(kind, place)
    for kind in ("Q8_0", "Q4_0"):
        gguf_file(kind, place)
    for folder in sorted(place.glob("*-plain")):
        assert load_file(folder / "model.safetensors").keys() == llama().state_dict().keys()
