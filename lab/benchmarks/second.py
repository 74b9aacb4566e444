"""Second implementations, really run: torch, PEFT, diffusers, mlx-lm, LM_Cocktail beside covmerge.

    python -m benchmarks.second

A number is ‖theirs − covmerge's‖ / ‖their update‖ over all that is merged. A library that is not installed
has no rows (`pip install --no-deps lm_cocktail==0.0.4 mlx-lm==0.32.2 "mlx[cpu]==0.32.4"`). Written into
results/second.json. FusionBench, mergekit and LyCORIS have scripts of their own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

import covmerge

RESULTS = Path(__file__).parent / "results" / "second.json"
State = dict[str, Tensor]
Row = tuple[str, str, str, float, str]  # library, its call, covmerge's method, apart, why


def off(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], base: State) -> float:
    """How far two merges are apart, over the length of the first's update."""
    names = [name for name in theirs if name in ours and name in base]
    differ = sum(float((theirs[n].double() - ours[n].double()).square().sum()) for n in names)
    update = sum(float((theirs[n].double() - base[n].double()).square().sum()) for n in names)
    return float(f"{(differ / update) ** 0.5:.1e}")


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A tiny Llama, and fine-tunes of it."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter) if seed else 0
    return model


def of_torch() -> Iterator[Row]:
    """Averages of whole models."""
    base, models = llama().state_dict(), [llama(seed) for seed in (1, 2, 3)]
    experts = {str(n): model.state_dict() for n, model in enumerate(models)}
    for call, how, weights in (
        ("AveragedModel", {}, [1 / 3] * 3),
        ("AveragedModel, EMA 0.9", {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, [0.81, 0.09, 0.1]),
    ):
        mean = AveragedModel(copy.deepcopy(models[0]), **how)
        for model in models:
            mean.update_parameters(model)
        weighted = dict(zip(experts, weights, strict=True))
        ours = covmerge.merge(base, experts, "linear", weights=weighted).tensors
        why = "float32 rounding" if not how else "the first model has weight 0.9², not 1 − 0.9"
        yield "torch", call, "linear", off(mean.module.state_dict(), ours, base), why


def of_cocktail() -> Iterator[Row]:
    """LM_Cocktail's mixes."""
    from LM_Cocktail import mix_models

    for dtype, count in ((torch.float32, 2), (torch.bfloat16, 10)):
        base = llama().to(dtype).state_dict()
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
            folders = [f"{place}/{seed}" for seed in range(1, count + 1)]
            for seed, folder in enumerate(folders, 1):
                llama(seed).to(dtype).save_pretrained(folder)
            mixed = mix_models(folders, "decoder", [1 / count] * count).state_dict()
            experts = {f"e{n}": folder for n, folder in enumerate(folders)}
            ours = covmerge.merge(base, experts, "linear").tensors
        why = (
            "float32 rounding" if count == 2 else "each product and each sum is rounded to bfloat16"
        )
        call = f"mix_models of {count}, {str(dtype).removeprefix('torch.')}"
        yield "lm_cocktail", call, "linear", off(mixed, ours, base), why


WHY = {
    "cat": "equal",
    "svd": "equal at the full rank",
    "linear": "A and B are added up apart: √(w·s)·A and √(w·s)·B, with cross terms",
    "ties": "A and B are trimmed and elected apart, which no update is",
    "ties_svd": "each layer is trimmed by itself there, all as one here",
    "magnitude_prune": "A and B are pruned apart",
    "dare_linear": "entries of A and B are dropped apart, at random",
    "dare_linear_svd": "half of the updates' entries are dropped at random",
    "magnitude_prune_svd": "half of the updates' entries are pruned first",
    "dare_ties": "entries of A and B are dropped apart, at random",
    "dare_ties_svd": "half of the updates' entries are dropped at random, then TIES",
}


def of_peft() -> Iterator[Row]:
    """Every combination type of add_weighted_adapter, of two adapters weighted by 0.5, or 1 of TIES."""
    base = llama()
    state = base.state_dict()
    with tempfile.TemporaryDirectory() as place:
        model = None
        for name in "ab":
            config = peft.LoraConfig(
                r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False
            )
            if model is None:
                model = peft.get_peft_model(copy.deepcopy(base), config, adapter_name=name)
            else:
                model.add_adapter(name, config)
        model.save_pretrained(place)
        experts = {name: f"{place}/{name}" for name in "ab"}
        for kind, why in WHY.items():
            pruned = any(word in kind for word in ("ties", "dare", "prune"))
            how = {"density": 0.5} if pruned else {}
            torch.manual_seed(0)
            whole = {"svd_rank": 32} if kind.endswith("svd") else {}
            elected = kind.startswith("ties")
            weights = [1.0, 1.0] if elected else [0.5, 0.5]
            model.add_weighted_adapter("ab", weights, kind, kind, **how, **whole)
            theirs = _updated(model, kind, state)
            method, options = ("ties", how) if elected else ("linear", {})
            ours = covmerge.merge(state, experts, method, **options).tensors
            yield "peft", f"add_weighted_adapter, {kind}", method, off(theirs, ours, state), why


def _updated(model: nn.Module, adapter: str, state: State) -> State:
    """The tensors that an adapter of a PEFT model changes, with it."""
    found: State = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            own = f"{name.removeprefix('base_model.model.')}.weight"
            found[own] = state[own] + module.get_delta_weight(adapter).detach()
    return found


def of_diffusers() -> Iterator[Row]:
    """Weighted adapters, fused."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    kinds = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16),
    }
    sizes = {
        "sample_size": 8,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "cross_attention_dim": 8,
    }
    model = UNet2DConditionModel(**kinds, **sizes, attention_head_dim=4)
    state = {name: own.clone() for name, own in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as place:
        for name in "ab":
            config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
            model.add_adapter(config, name)
            model.save_lora_adapter(f"{place}/{name}", adapter_name=name)
        model.set_adapters(["a", "b"], [0.75, 0.25])
        model.fuse_lora(adapter_names=["a", "b"])
        fused = {n.replace(".base_layer", ""): own for n, own in model.state_dict().items()}
        experts = {n: f"{place}/{n}/pytorch_lora_weights.safetensors" for n in "ab"}
        weights = {"a": 0.75, "b": 0.25}
        ours = covmerge.merge(state, experts, "linear", weights=weights).tensors
    changed = {
        name: own for name, own in fused.items() if name.endswith(("to_q.weight", "to_v.weight"))
    }
    yield (
        "diffusers",
        "set_adapters, fuse_lora",
        "linear",
        off(changed, ours, state),
        "float32 rounding",
    )


def of_mlx() -> Iterator[Row]:
    """A LoRA, fused into plain and into 4-bit weights."""
    import mlx.core as mx
    import mlx.nn
    import numpy as np
    from mlx_lm.tuner.lora import LoRALinear

    mx.random.seed(0)
    for bits in (0, 4):
        layer = mlx.nn.Linear(64, 64, bias=False)
        if bits:
            layer = mlx.nn.QuantizedLinear.from_linear(layer, 64, bits)
        lora = LoRALinear.from_base(layer, r=4, scale=2.0)
        lora.lora_b = 0.01 * mx.random.normal((4, 64))

        def plain(own: Any, packed: int = bits) -> Tensor:
            weight = (
                mx.dequantize(own.weight, own.scales, own.biases, 64, packed)
                if packed
                else own.weight
            )
            return torch.from_numpy(np.array(weight))

        state = {"l.weight": plain(layer)}
        with tempfile.TemporaryDirectory() as place:
            parts = {"l.lora_a": np.array(lora.lora_a), "l.lora_b": np.array(lora.lora_b)}
            stored = {name: torch.from_numpy(own) for name, own in parts.items()}
            save_file(stored, f"{place}/adapters.safetensors")
            config = {"fine_tune_type": "lora", "num_layers": 1}
            config["lora_parameters"] = {"rank": 4, "scale": 2.0, "dropout": 0.0}
            Path(place, "adapter_config.json").write_text(json.dumps(config))
            ours = covmerge.merge(state, {"a": place}, "linear").tensors
        why = (
            "rounded to the base's 4-bit grid, where most falls back"
            if bits
            else "float32 rounding"
        )
        call = "LoRALinear.fuse, 4 bits" if bits else "LoRALinear.fuse"
        yield "mlx-lm", call, "linear", off({"l.weight": plain(lora.fuse())}, ours, state), why


LIBRARIES: dict[str, Callable[[], Iterator[Row]]] = {
    "torch": of_torch,
    "lm_cocktail": of_cocktail,
    "peft": of_peft,
    "diffusers": of_diffusers,
    "mlx-lm": of_mlx,
}


if __name__ == "__main__":
    rows, versions = [], {}
    for library, run in LIBRARIES.items():
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
        for row in run():
            print(*row, sep=" | ")
            rows.append(dict(zip(("library", "call", "method", "apart", "why"), row, strict=True)))
    RESULTS.write_text(
        json.dumps({"versions": versions, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    )
