"""Names of a U-Net's layers in single-file checkpoints (input_blocks, ...), as diffusers has them."""

from __future__ import annotations

import re

_LAYERS = 2  # of a block at one resolution, in all of Stable Diffusion
_BLOCK = re.compile(r"(input|output)_blocks\.(\d{1,2})\.(\d)\.(.+)|middle_block\.(\d)\.(.+)")
_FIRST = {
    "time_embed.0.": "time_embedding.linear_1.",
    "time_embed.2.": "time_embedding.linear_2.",
    "label_emb.0.0.": "add_embedding.linear_1.",
    "label_emb.0.2.": "add_embedding.linear_2.",
    "input_blocks.0.0.": "conv_in.",
    "out.0.": "conv_norm_out.",
    "out.2.": "conv_out.",
}
_IN_RESNET = {
    "in_layers.0.": "norm1.",
    "in_layers.2.": "conv1.",
    "emb_layers.1.": "time_emb_proj.",
    "out_layers.0.": "norm2.",
    "out_layers.3.": "conv2.",
    "skip_connection.": "conv_shortcut.",
}


def diffusers_name(name: str) -> str | None:
    """Return what diffusers calls a tensor of a U-Net; None: it has none of this name.

    Example:
        >>> diffusers_name("input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight")
        'down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight'
        >>> diffusers_name("output_blocks.2.1.conv.bias")
        'up_blocks.0.upsamplers.0.conv.bias'
    """
    if (renamed := _renamed(name, _FIRST)) is not None:
        return renamed
    found = _BLOCK.fullmatch(name)
    if found is None:
        return None
    side, number, place, inner, middle, in_middle = found.groups()
    if middle is not None:
        if middle == "1":
            return f"mid_block.attentions.0.{in_middle}"
        return _in_resnet(f"mid_block.resnets.{int(middle) // 2}", in_middle)
    if side == "input":
        block, layer = divmod(int(number) - 1, _LAYERS + 1)
        prefix = f"down_blocks.{block}"
        if inner.startswith("op."):
            return f"{prefix}.downsamplers.0.conv.{inner.removeprefix('op.')}"
    else:
        block, layer = divmod(int(number), _LAYERS + 1)
        prefix = f"up_blocks.{block}"
        if inner.startswith("conv."):
            return f"{prefix}.upsamplers.0.{inner}"
    if place == "0":
        return _in_resnet(f"{prefix}.resnets.{layer}", inner)
    return f"{prefix}.attentions.{layer}.{inner}"


def flat_diffusers_name(name: str) -> str | None:
    """Return the same of a name whose dots are underscores, as Kohya's scripts write it.

    Example:
        >>> flat_diffusers_name("input_blocks_4_0_in_layers_2_weight")
        'down_blocks_1_resnets_0_conv1_weight'
    """
    for dotted in (*_FIRST, *_IN_RESNET):
        name = name.replace(dotted.replace(".", "_"), dotted)
    name = re.sub(r"^(input|output)_blocks_(\d+)_(\d)_", r"\1_blocks.\2.\3.", name)
    name = re.sub(r"^middle_block_(\d)_", r"middle_block.\1.", name)
    name = re.sub(r"\.(op|conv)_", r".\1.", name)
    found = diffusers_name(name)
    return None if found is None else found.replace(".", "_")


def _in_resnet(prefix: str, inner: str) -> str | None:
    renamed = _renamed(inner, _IN_RESNET)
    return None if renamed is None else f"{prefix}.{renamed}"


def _renamed(name: str, table: dict[str, str]) -> str | None:
    for theirs, ours in table.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None
