"""Small merges to report on: what each expert moved is known."""

import torch
from safetensors.torch import save_file

import covmerge
from covmerge.front import api

KINDS = ("mlp.up_proj", "self_attn.q_proj")


def checkpoints(folder, scales, *, blocks=4, width=12, kinds=KINDS, names=None):
    """A base and experts; `scales` are their steps, by expert, or by expert and block.

    `names` renames tensors.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{block}.{kind}.weight": torch.randn(width, width, generator=generator)
        for block in range(blocks)
        for kind in kinds
    }
    tensors["pooler.dense.weight"] = torch.randn(width, width, generator=generator)
    named = dict(zip(tensors, names or tensors, strict=False))
    paths = {}
    for expert, scale in {"base": 0.0, **scales}.items():
        moved = {}
        for name, tensor in tensors.items():
            block = int(name.split(".")[1]) if name.startswith("layers") else 0
            step = scale[block] if isinstance(scale, list) else scale
            update = torch.randn(tensor.shape, generator=generator)
            moved[named.get(name, name)] = tensor + step * update
        paths[expert] = folder / f"{expert}.safetensors"
        save_file(moved, paths[expert])
    return paths.pop("base"), paths


def merge(folder, scales, method="ace", *, params=None, **given):
    """Merge to `folder / "out"`; returns what `covmerge.merge` does."""
    base, experts = checkpoints(folder, scales, **given)
    return covmerge.merge(base, experts, method, folder / "out", **(params or {}))


def report(folder, scales, method="ace", *, spectra="all", **given):
    """Merge and report, with times."""
    result = merge(folder, scales, method, **given)
    return api.report(folder / "out", merged=result, spectra=spectra)


def inspect(scales, *, blocks=4, width=12, kinds=KINDS, single=0, spectra="all"):
    """Look at experts in memory; so many layers are in no block."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{block}.{kind}.weight" for block in range(blocks) for kind in kinds]
    names += [f"layer_outside_{chr(97 + n)}.of_a_long_name.weight" for n in range(single)]
    base = {name: torch.randn(width, width, generator=generator) for name in names}
    experts = {
        expert: {
            name: tensor + scale * torch.randn(width, width, generator=generator)
            for name, tensor in base.items()
        }
        for expert, scale in scales.items()
    }
    return covmerge.inspect(base, experts, spectra=spectra)
