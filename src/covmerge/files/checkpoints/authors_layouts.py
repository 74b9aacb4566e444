"""Rules from the layouts of diffusion transformers' authors and ComfyUI to diffusers' names and pieces."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Given = Mapping[str, Any]  # a rule as in `conversions.json`

PREFIX = r"^(?:model\.)?diffusion_model\."  # in ComfyUI's files and single files


def _renamed(*pairs: tuple[str, str]) -> list[Given]:
    return [{"from": [source], "to": [target]} for source, target in pairs]


def _apart(source: str, *targets: str, by: str = "Chunk") -> Given:
    return {"from": [source], "to": list(targets), "by": [[by, 0]]}


def _swapped(source: str, target: str) -> Given:
    # The authors store shift and scale, diffusers scale and shift.
    return {"from": [source], "to": [target], "by": [["Swap", 0]]}


_IMAGE = ("attn.to_q.", "attn.to_k.", "attn.to_v.")
_TEXT = ("attn.add_q_proj.", "attn.add_k_proj.", "attn.add_v_proj.")
_FLUX: list[Given] = [
    *_renamed(
        (r"^time_in\.in_layer\.", "time_text_embed.timestep_embedder.linear_1."),
        (r"^time_in\.out_layer\.", "time_text_embed.timestep_embedder.linear_2."),
        (r"^vector_in\.in_layer\.", "time_text_embed.text_embedder.linear_1."),
        (r"^vector_in\.out_layer\.", "time_text_embed.text_embedder.linear_2."),
        (r"^guidance_in\.in_layer\.", "time_text_embed.guidance_embedder.linear_1."),
        (r"^guidance_in\.out_layer\.", "time_text_embed.guidance_embedder.linear_2."),
        (r"^txt_in\.", "context_embedder."),
        (r"^img_in\.", "x_embedder."),
        (r"^double_blocks\.", "transformer_blocks."),
        (r"^single_blocks\.", "single_transformer_blocks."),
        (r"\.img_mod\.lin\.", ".norm1.linear."),
        (r"\.txt_mod\.lin\.", ".norm1_context.linear."),
        (r"\.modulation\.lin\.", ".norm.linear."),
        (r"\.img_attn\.norm\.query_norm\.scale$", ".attn.norm_q.weight"),
        (r"\.img_attn\.norm\.key_norm\.scale$", ".attn.norm_k.weight"),
        (r"\.txt_attn\.norm\.query_norm\.scale$", ".attn.norm_added_q.weight"),
        (r"\.txt_attn\.norm\.key_norm\.scale$", ".attn.norm_added_k.weight"),
        (r"\.norm\.query_norm\.scale$", ".attn.norm_q.weight"),
        (r"\.norm\.key_norm\.scale$", ".attn.norm_k.weight"),
        (r"\.img_mlp\.0\.", ".ff.net.0.proj."),
        (r"\.img_mlp\.2\.", ".ff.net.2."),
        (r"\.txt_mlp\.0\.", ".ff_context.net.0.proj."),
        (r"\.txt_mlp\.2\.", ".ff_context.net.2."),
        (r"\.img_attn\.proj\.", ".attn.to_out.0."),
        (r"\.txt_attn\.proj\.", ".attn.to_add_out."),
        (r"\.linear2\.", ".proj_out."),
        (r"^final_layer\.linear\.", "proj_out."),
    ),
    _apart(r"img_attn\.qkv\.", *_IMAGE),
    _apart(r"txt_attn\.qkv\.", *_TEXT),
    _apart(r"linear1\.", *_IMAGE, "proj_mlp.", by="Split"),
    _swapped(r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear."),
]
_SD3: list[Given] = [
    *_renamed(
        (r"^pos_embed$", "pos_embed.pos_embed"),
        (r"^x_embedder\.proj\.", "pos_embed.proj."),
        (r"^t_embedder\.mlp\.0\.", "time_text_embed.timestep_embedder.linear_1."),
        (r"^t_embedder\.mlp\.2\.", "time_text_embed.timestep_embedder.linear_2."),
        (r"^y_embedder\.mlp\.0\.", "time_text_embed.text_embedder.linear_1."),
        (r"^y_embedder\.mlp\.2\.", "time_text_embed.text_embedder.linear_2."),
        (r"^joint_blocks\.", "transformer_blocks."),
        (r"\.x_block\.(attn2?)\.ln_q\.", r".\1.norm_q."),
        (r"\.x_block\.(attn2?)\.ln_k\.", r".\1.norm_k."),
        (r"\.context_block\.attn\.ln_q\.", ".attn.norm_added_q."),
        (r"\.context_block\.attn\.ln_k\.", ".attn.norm_added_k."),
        (r"\.x_block\.(attn2?)\.proj\.", r".\1.to_out.0."),
        (r"\.context_block\.attn\.proj\.", ".attn.to_add_out."),
        (r"\.x_block\.adaLN_modulation\.1\.", ".norm1.linear."),
        (r"\.x_block\.mlp\.fc1\.", ".ff.net.0.proj."),
        (r"\.x_block\.mlp\.fc2\.", ".ff.net.2."),
        (r"\.context_block\.mlp\.fc1\.", ".ff_context.net.0.proj."),
        (r"\.context_block\.mlp\.fc2\.", ".ff_context.net.2."),
        (r"^final_layer\.linear\.", "proj_out."),
    ),
    _apart(r"x_block\.attn\.qkv\.", *_IMAGE),
    _apart(r"x_block\.attn2\.qkv\.", "attn2.to_q.", "attn2.to_k.", "attn2.to_v."),
    _apart(r"context_block\.attn\.qkv\.", *_TEXT),
    _swapped(r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear."),
    # The last block outputs no text, so its norm has another form.
    _swapped(
        r"(?<=^transformer_blocks\.{last}\.)context_block\.adaLN_modulation\.1\.",
        "norm1_context.linear.",
    ),
    {
        "from": [r"context_block\.adaLN_modulation\.1\."],
        "to": ["norm1_context.linear."],
        "by": [["Concatenate", 0]],  # of one tensor: unchanged
    },
]
_WAN: list[Given] = _renamed(
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.self_attn\.", ".attn1."),
    (r"\.o\.", ".to_out.0."),
    (r"\.q\.", ".to_q."),
    (r"\.k\.", ".to_k."),
    (r"\.v\.", ".to_v."),
    (r"\.k_img\.", ".add_k_proj."),
    (r"\.v_img\.", ".add_v_proj."),
    (r"\.norm_k_img\.", ".norm_added_k."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
    # diffusers numbers the norms in the order in which they are used.
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm_of_text."),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
    (r"\.norm_of_text\.", ".norm3."),
    (r"\.before_proj\.", ".proj_in."),
    (r"\.after_proj\.", ".proj_out."),
)
# This is ComfyUI's layout. The authors use diffusers' names, as in Qwen-Image before 2.1.
_QWEN_IMAGE_21 = [_apart(r"img_mlp\.gate_up\.", "img_mlp.gate_layer.", "img_mlp.proj.")]
# A name that only the authors' layout of a model has, with the number of its block, and the rules.
_LAYOUTS = (
    (re.compile(rf"(?:{PREFIX}|^)double_blocks\.(\d+)\.img_mod\.lin\.weight$"), _FLUX),
    (re.compile(rf"(?:{PREFIX}|^)joint_blocks\.(\d+)\.x_block\.attn\.qkv\.weight$"), _SD3),
    (re.compile(rf"(?:{PREFIX}|^)blocks\.(\d+)\.cross_attn\.norm_q\.weight$"), _WAN),
    (
        re.compile(rf"(?:{PREFIX}|^)transformer_blocks\.(\d+)\.img_mlp\.gate_up\.weight$"),
        _QWEN_IMAGE_21,
    ),
)
# How names of layers begin in LoRA files, which need not have the layers above, and the rules.
_OF_LORA = (
    (re.compile(r"(?:double|single)_blocks[._]\d"), _FLUX),
    (re.compile(r"joint_blocks[._]\d"), _SD3),
    (re.compile(r"blocks[._]\d+[._](?:self_attn|cross_attn|ffn)[._]"), _WAN),
)
_OF_DIFFUSERS = re.compile(r"transformer_blocks\.(\d+)\.")
_JOINED_WORDS = re.compile(r"[A-Za-z]+(?:_[A-Za-z]+)+")
_PREFIX = re.compile(PREFIX)


def rules_for(names: Collection[str]) -> list[Given]:
    """Return the rules from a file's names to diffusers' names; none if the file needs no rules."""
    found: list[Given] = []
    if any(_PREFIX.match(name) for name in names):
        found += _renamed((PREFIX, ""))
    for sign, rules in _LAYOUTS:
        blocks = [int(match[1]) for name in names if (match := sign.match(name))]
        if blocks:
            found += _with_last(rules, blocks)
            break
    return found


def rules_of_lora(names: Collection[str], base: Collection[str]) -> list[Given]:
    """Return the rules from a LoRA file's names, without the part's, to those of diffusers' base."""
    blocks = [int(match[1]) for name in base if (match := _OF_DIFFUSERS.match(name))]
    for sign, rules in _OF_LORA:
        if any(sign.match(name) for name in names):
            return _with_last(rules, blocks or [0])
    return []


def dotted_name(name: str, rules: Sequence[Given]) -> str:
    """Return an authors' name of a layer that Kohya's scripts wrote with underscores for dots.

    Example:
        >>> dotted_name("double_blocks_0_img_attn_qkv.weight", _FLUX)
        'double_blocks.0.img_attn.qkv.weight'
    """
    words = {word for rule in rules for one in rule["from"] for word in _JOINED_WORDS.findall(one)}
    either = "|".join(sorted(words, key=len, reverse=True))
    found = re.compile(rf"(?:(?<=[._])|^)(?:{either})(?=[._])|_")
    return found.sub(lambda match: "." if match[0] == "_" else match[0], name)


def _with_last(rules: Sequence[Given], blocks: Collection[int]) -> list[Given]:
    last = str(max(blocks))
    return [{**rule, "from": [s.replace("{last}", last) for s in rule["from"]]} for rule in rules]
