"""A tiny U-Net of diffusers, LoRA files of it in several forms, and what diffusers makes of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

LEAVES = ("weight", "bias")
TARGETS = (
    "to_q",
    "to_v",
    "to_out.0",
    "ff.net.2",
    "proj_in",
    "conv1",
    "conv_shortcut",
    "time_emb_proj",
)


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
        )


def single_file_names(model: nn.Module) -> dict[str, str]:
    """Names in a single-file checkpoint, by diffusers' names; checked against diffusers' own conversion."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    resnet = ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3")
    resnet = (*resnet, "skip_connection")
    modules = [*(f"time_embed.{n}" for n in (0, 2)), "input_blocks.0.0", "out.0", "out.2"]
    modules += [f"input_blocks.{n}.0.{name}" for n in (1, 2, 4, 5) for name in resnet]
    modules += ["input_blocks.3.0.op", "output_blocks.2.1.conv"]
    modules += [f"middle_block.{n}.{name}" for n in (0, 2) for name in resnet[:-1]]
    modules += [f"output_blocks.{n}.0.{name}" for n in range(6) for name in resnet]
    attentions = {  # a block in which diffusers and single files agree on everything but its name
        "down_blocks.0.attentions.0.": ("input_blocks.1.1.", "input_blocks.2.1."),
        "mid_block.attentions.0.": ("middle_block.1.",),
        "up_blocks.1.attentions.0.": tuple(f"output_blocks.{n}.1." for n in (3, 4, 5)),
    }
    for prefix, places in attentions.items():
        inside = [n.removeprefix(prefix) for n in model.state_dict() if n.startswith(prefix)]
        names = dict.fromkeys(name.rpartition(".")[0] for name in inside)
        modules += [f"{place}{name}" for place in places for name in names]
    names = [f"model.diffusion_model.{module}.{leaf}" for module in modules for leaf in LEAVES]
    numbered = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    found = convert_ldm_unet_checkpoint(dict(numbered), dict(model.config))
    return {name: names[int(number)] for name, number in found.items()}


def layers(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are adapted: matrices and convolutions."""
    return {
        name.removesuffix(".weight"): weight
        for name, weight in model.state_dict().items()
        if name.removesuffix(".weight").endswith(TARGETS)
    }


def kohya(weights: dict[str, Tensor], seed: int, rank: int, alpha: float, part="lora_unet_"):
    """A file as Kohya's scripts write it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in weights.items():
        stem = f"{part}{module.replace('.', '_')}"
        down, up = factors(weight, rank, generator)
        tensors[f"{stem}.lora_down.weight"] = down
        tensors[f"{stem}.lora_up.weight"] = up
        tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def diffusers_form(weights: dict[str, Tensor], seed: int, rank: int, part="unet."):
    """A file as diffusers writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in weights.items():
        down, up = factors(weight, rank, generator)
        tensors[f"{part}{module}.lora_A.weight"] = down
        tensors[f"{part}{module}.lora_B.weight"] = up
    return tensors


def factors(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    window = [1] * (weight.dim() - 2)
    down = 0.3 * torch.randn(rank, *weight.shape[1:], generator=generator)
    return down, 0.3 * torch.randn(weight.shape[0], rank, *window, generator=generator)


def saved(folder: Path) -> nn.Module:
    """A U-Net's folder, and beside it two files of Kohya's form and one of diffusers'."""
    model = unet()
    model.save_pretrained(folder / "unet")
    weights = layers(model)
    save_file(kohya(weights, 1, rank=3, alpha=2.0), folder / "one.safetensors")
    save_file(kohya(weights, 2, rank=2, alpha=2.0), folder / "two.safetensors")
    save_file(diffusers_form(weights, 3, rank=4), folder / "three.safetensors")
    return model


def fused(files: dict[str, Path], scales: list[object]) -> dict[str, Tensor]:
    """What diffusers makes of a U-Net and LoRA files, each with its scale, or one for each block."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

    model = unet()
    for name, file in files.items():
        tensors, alphas = Loader.lora_state_dict(str(file), unet_config=model.config)
        Loader.load_lora_into_unet(tensors, alphas, model, adapter_name=name)
    model.set_adapters(list(files), scales)
    model.fuse_lora(adapter_names=list(files))
    model.unload_lora()
    return {name: weight.detach() for name, weight in model.state_dict().items()}
