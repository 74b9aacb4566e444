"""Merges of LoRA files of diffusion models: all spellings of their names, and damaged files.

    python -m tests.campaigns.loras --count 200

Modules are listed with the names that diffusers, single-file checkpoints and text encoders have for them.
From these follow all keys that Kohya's scripts, diffusers, ComfyUI and PEFT write. A file with any other
key, with half a pair, with a module twice, or with another scale in its metadata has no meaning here, and
must be refused. So must one that updates a text encoder that the base has under names that are not read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load, save
from torch import Tensor

from tests.campaigns import formats, outcomes
from tests.campaigns.merged import Source, plain, trial

D = 8  # of all layers, but for embeddings of text and of time, and the feed-forward's

# The U-Net: by diffusers' name the one of a single file, and the shape.
_ATTENTION = {
    **{f"transformer_blocks.0.attn1.to_{x}": (D, D) for x in "qkv"},
    **{f"transformer_blocks.0.attn2.to_{x}": (D, 12) for x in "kv"},
    "transformer_blocks.0.attn2.to_q": (D, D),
    "transformer_blocks.0.attn1.to_out.0": (D, D),
    "transformer_blocks.0.ff.net.0.proj": (8 * D, D),
    "transformer_blocks.0.ff.net.2": (D, 4 * D),
    "proj_in": (D, D, 1, 1),
    "proj_out": (D, D),
}
_RESNET = {
    "conv1": ("in_layers.2", (D, D, 3, 3)),
    "time_emb_proj": ("emb_layers.1", (D, 16)),
    "conv2": ("out_layers.3", (D, D, 3, 3)),
    "conv_shortcut": ("skip_connection", (D, D, 1, 1)),
}
_PLACES = {  # of attentions, and of the resnets before them
    "down_blocks.0.{}.0": "input_blocks.1",
    "down_blocks.0.{}.1": "input_blocks.2",
    "down_blocks.1.{}.1": "input_blocks.5",
    "up_blocks.1.{}.0": "output_blocks.3",
    "up_blocks.1.{}.2": "output_blocks.5",
}
UNET: dict[str, tuple[str, tuple[int, ...]]] = {
    "conv_in": ("input_blocks.0.0", (D, 4, 3, 3)),
    "time_embedding.linear_1": ("time_embed.0", (16, D)),
    "down_blocks.0.downsamplers.0.conv": ("input_blocks.3.0.op", (D, D, 3, 3)),
    "up_blocks.0.upsamplers.0.conv": ("output_blocks.2.1.conv", (D, D, 3, 3)),
    "conv_out": ("out.2", (4, D, 3, 3)),
    "mid_block.resnets.1.conv1": ("middle_block.2.in_layers.2", (D, D, 3, 3)),
    **{
        f"mid_block.attentions.0.{inner}": (f"middle_block.1.{inner}", shape)
        for inner, shape in _ATTENTION.items()
    },
    **{
        f"{ours.format('attentions')}.{inner}": (f"{theirs}.1.{inner}", shape)
        for ours, theirs in _PLACES.items()
        for inner, shape in _ATTENTION.items()
    },
    **{
        f"{ours.format('resnets')}.{inner}": (f"{theirs}.0.{other}", shape)
        for ours, theirs in _PLACES.items()
        for inner, (other, shape) in _RESNET.items()
    },
}
_LAYER = {
    **{f"self_attn.{x}_proj": (D, D) for x in ("q", "k", "v", "out")},
    **{"mlp.fc1": (4 * D, D), "mlp.fc2": (D, 4 * D)},
}
TEXT = {
    f"text_model.encoder.layers.{n}.{inner}": shape
    for n in (0, 11)
    for inner, shape in _LAYER.items()
}
# Its larger sister, by whose shapes the two are told apart.
TEXT_2 = {name: tuple(2 * size for size in shape) for name, shape in TEXT.items()}
FLUX = {
    **{f"transformer_blocks.1.attn.{n}": (D, D) for n in ("to_q", "to_k", "to_v", "add_q_proj")},
    "transformer_blocks.1.attn.to_out.0": (D, D),
    "transformer_blocks.1.ff_context.net.0.proj": (4 * D, D),
    "single_transformer_blocks.3.proj_mlp": (4 * D, D),
    "single_transformer_blocks.3.attn.to_v": (D, D),
    "x_embedder": (D, 4),
}
# As its own authors store it; Kohya's scripts train it under these names.
FLUX_OWN = {
    "double_blocks.1.img_attn.qkv": (3 * D, D),
    "double_blocks.1.txt_attn.proj": (D, D),
    "double_blocks.1.img_mlp.0": (4 * D, D),
    "single_blocks.3.linear1": (7 * D, D),
    "img_in": (D, 4),
}

_SECOND = "conditioner.embedders.1"  # where a single file has SDXL's second text encoder

Module = tuple[str, str]  # a part of a pipeline, and a name in it
Key = tuple[Module, str]  # a module, and what of it: down, up, alpha

_PARTS = {
    "unet": (("lora_unet_",), ("unet.", "diffusion_model.")),
    "text": (("lora_te_",), ("text_encoder.",)),
    "text_1": (("lora_te1_",), ("text_encoder.",)),
    "text_2": (("lora_te2_",), ("text_encoder_2.",)),
    "flux": (("lora_transformer_",), ("transformer.",)),
    "flux_own": (("lora_unet_",), ("diffusion_model.",)),
}
MODULES: dict[str, dict[str, tuple[int, ...]]] = {
    "unet": {name: shape for name, (_, shape) in UNET.items()},
    "text": TEXT,
    "text_1": TEXT,  # the same of SDXL, which diffusers calls as it does that of others
    "text_2": TEXT_2,
    "flux": FLUX,
    "flux_own": FLUX_OWN,
}
_FLAT = {"lora_down.weight": "down", "lora_up.weight": "up", "alpha": "alpha"}
_DOTTED = (
    {"lora_A.weight": "down", "lora_B.weight": "up"},
    {"lora.down.weight": "down", "lora.up.weight": "up"},
    {"lora_linear_layer.down.weight": "down", "lora_linear_layer.up.weight": "up"},
    {"lora_down.weight": "down", "lora_up.weight": "up", "alpha": "alpha"},
)


def spellings(part: str, name: str, form: str) -> list[tuple[str, dict[str, str]]]:
    """The stems that a form has for a module, and what may follow each."""
    flat, dotted = _PARTS[part]
    if form == "kohya":
        names = [name, UNET[name][0]] if part == "unet" else [name]
        return [(f"{start}{one.replace('.', '_')}.", _FLAT) for start in flat for one in names]
    found = [(f"{start}{name}.", ends) for start in dotted for ends in _DOTTED]
    if part == "unet":
        # ComfyUI knows the layers as single files do.
        found += [(f"diffusion_model.{UNET[name][0]}.", ends) for ends in _DOTTED]
    block, _, leaf = name.rpartition(".attn1.")
    if block and leaf in ("to_q", "to_k", "to_v"):
        ends = {f"{leaf}_lora.{side}.weight": side for side in ("down", "up")}
        found += [(f"{start}{block}.attn1.processor.", ends) for start in dotted]
    return found


def keys(form: str) -> dict[str, list[Key]]:
    """All keys of a form, and what they are of."""
    found: dict[str, list[Key]] = {}
    for part, modules in MODULES.items():
        for name in modules:
            for stem, ends in spellings(part, name, form):
                for end, role in ends.items():
                    found.setdefault(stem + end, []).append(((part, name), role))
    return found


KEYS = {form: keys(form) for form in ("kohya", "diffusers")}


def base_of(kind: str) -> dict[str, Module]:
    """The tensors of a base, by name, that are weights of modules."""
    if kind in MODULES:
        return {f"{name}.weight": (kind, name) for name in MODULES[kind]}
    inner = {f"{theirs}.weight": ("unet", ours) for ours, (theirs, _) in UNET.items()}
    if kind == "single file, Flux":
        inner = {f"{name}.weight": ("flux_own", name) for name in FLUX_OWN}
    found = {f"model.diffusion_model.{name}": module for name, module in inner.items()}
    text = {
        "single file": "cond_stage_model.transformer",
        "single file, SDXL": "conditioner.embedders.0.transformer",
    }.get(kind)
    if text is not None:
        part = "text_1" if "SDXL" in kind else "text"
        found |= {f"{text}.{name}.weight": (part, name) for name in TEXT}
    return found


def written(parts: list[str], form: str, random: Random) -> dict[str, Tensor]:
    """An adapter of these parts in one form, all of a part in one spelling."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    rank, dtype = (
        random.choice((1, 2, 4)),
        random.choice((torch.float32, torch.float32, torch.bfloat16)),
    )
    alpha = random.choice((None, 1.0, 4.0, 0.5, -1.0))
    found: dict[str, Tensor] = {}
    for part in parts:
        spelling = random.randrange(12)
        names = [name for name in MODULES[part] if random.random() < 0.5] or [*MODULES[part]][:1]
        for name in names:
            every = spellings(part, name, form)
            stem, ends = every[spelling % len(every)]
            shape = MODULES[part][name]
            own = {
                "down": 0.3 * torch.randn(rank, *shape[1:], generator=generator),
                "up": 0.3
                * torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=generator),
            }
            found |= {
                stem + end: own[role].to(dtype) for end, role in ends.items() if role != "alpha"
            }
            if alpha is not None and "alpha" in ends.values():
                found[f"{stem}alpha"] = torch.tensor(alpha, dtype=dtype)
    return found


def meant(file: bytes, form: str, base: Mapping[str, Tensor], kind: str) -> dict[str, Tensor] | str:
    """The model that an adapter makes of a base, or why it makes none."""
    try:
        held = load(file)
    except Exception as error:
        return str(error)
    names = {module: name for name, module in base_of(kind).items()}
    parts = {part for part, _ in names}
    if "lora_alpha" in _metadata(file):
        return "its scale is in its metadata"
    roles: dict[Module, dict[str, Tensor]] = {}
    for key, tensor in held.items():
        every = KEYS[form].get(key, [])
        # A second text encoder has the names of the first, and other shapes.
        found = [own for own in every if own[0][0] in parts] or every
        if not found:
            return f"'{key}' has no meaning"
        module, role = found[0]
        if role in roles.setdefault(module, {}) and module[0] in parts:
            return f"'{key}' is there twice"
        roles[module][role] = tensor
    values = {name: tensor.double() for name, tensor in base.items()}
    if not any(module[0] in parts for module in roles):
        return "no part of it is the base's"
    if any(name.startswith(_SECOND) for name in base) and any(
        part == "text_2" for part, _ in roles
    ):
        return "the base has the second text encoder under other names"
    for module, own in roles.items():
        update = _update(own)
        if isinstance(update, str):
            return f"{module}: {update}"
        if module[0] in parts:
            if module not in names or base[names[module]].shape != update.shape:
                return f"{module} is not the base's"
            values[names[module]] = values[names[module]] + update
    return values


def _metadata(file: bytes) -> str:
    """What a file says beside its tensors."""
    return str(json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]).get("__metadata__"))


def _update(own: Mapping[str, Tensor]) -> Tensor | str:
    if not {"down", "up"} <= own.keys():
        return "half a pair"
    down, up = own["down"].double(), own["up"].double()
    whole = all(
        tensor.is_floating_point() and tensor.ndim >= 2 for tensor in (own["down"], own["up"])
    )
    if (
        not whole
        or up.ndim != down.ndim
        or up.shape[1] != len(down)
        or math.prod(up.shape[2:]) != 1
    ):
        return "factors that do not fit"
    alpha = own.get("alpha")
    if alpha is not None and alpha.numel() != 1:
        return "several numbers of alpha"
    scale = 1.0 if alpha is None else float(alpha.double()) / len(down)
    return scale * (up.flatten(1) @ down.flatten(1)).reshape(len(up), *down.shape[1:])


def twice(tensors: dict[str, Tensor], form: str, random: Random) -> dict[str, Tensor]:
    """The same with one module in a second spelling."""
    key = random.choice([*tensors])
    module = KEYS[form][key][0][0]
    own = {KEYS[form][k][0][1]: t for k, t in tensors.items() if KEYS[form][k][0][0] == module}
    stem, ends = random.choice(spellings(*module, form))
    more = {stem + end: own[role].clone() for end, role in ends.items() if role in own}
    return {**more, **tensors}


def damaged(tensors: dict[str, Tensor], random: Random) -> Iterator[dict[str, Tensor]]:
    """What a script or a hand makes of an adapter's tensors."""
    name = random.choice([*tensors])
    own = tensors[name]
    match random.randrange(7):
        case 0:
            yield {key: tensor for key, tensor in tensors.items() if key != name}
        case 1:
            yield {**tensors, name: own.mT if own.ndim > 1 else own.repeat(2)}
        case 2:
            yield {**tensors, name: own * random.choice((math.nan, math.inf, -1.0, 0.0))}
        case 3:
            other = random.choice([key for form in KEYS.values() for key in form])
            yield {**tensors, other: own.clone()}
        case 4:
            more = (
                "dora_scale",
                "lora_mid.weight",
                "diff",
                "hada_w1_a",
                "lokr_w1",
                "bias",
                "norm_A",
            )
            yield {**tensors, f"{name.split('.lora')[0]}.{random.choice(more)}": torch.ones(2, 2)}
        case 5:
            yield {key: tensor for key, tensor in tensors.items() if key != name} | {
                f"{name[:-9]}x{name[-9:]}": own
            }
        case _:
            yield {**tensors, name: own[:1] if own.ndim else own.repeat(3)}


def merge(kind: str, form: str, folder: Path, random: Random) -> outcomes.Verdict:
    """Merge two adapters, one in two times one that is damaged, into a part or a single file."""
    modules = base_of(kind)
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    dtype = random.choice((torch.float32, torch.float32, torch.bfloat16))
    shapes = {name: MODULES[part][inner] for name, (part, inner) in modules.items()}
    shapes |= (
        {"norm.weight": (D,)}
        if kind in MODULES
        else {"first_stage_model.conv.weight": (D, D, 1, 1)}
    )
    base = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    if kind == "single file, SDXL" and random.random() < 0.5:
        base[f"{_SECOND}.model.ln_final.weight"] = torch.ones(D, dtype=dtype)
    own_parts = sorted({part for part, _ in modules.values()})
    own_parts = [part for part in own_parts if form == "kohya" or _PARTS[part][1]]
    others = {
        "unet": ["text"],
        "text": ["unet"],
        "text_2": ["unet", "text"],
        "single file, SDXL": ["text_2"],
    }.get(kind, [])
    experts: dict[str, Source] = {}
    right = True
    for expert in "ab":
        parts = own_parts + [part for part in others if random.random() < 0.5]
        tensors = written(parts, form, random)
        hurt = expert == "a" and random.random() < 0.5
        if hurt and random.random() < 0.6:
            tensors = next(damaged(tensors, random))
        elif hurt and random.random() < 0.5:
            tensors = twice(tensors, form, random)
        metadata = {"ss_network_module": "networks.lora", "ss_network_alpha": "7"}
        if hurt and random.random() < 0.2:
            told = {"unet.r": 4, "unet.lora_alpha": random.choice((1, 3, 8, 16.5))}
            metadata["lora_adapter_metadata"] = json.dumps(told)
        file = save(
            {name: own.contiguous() for name, own in tensors.items()},
            metadata if random.random() < 0.5 or len(metadata) > 2 else None,
        )
        if hurt and random.random() < 0.5:
            file = formats.change("adapter.safetensors", file, random)
        hurt = hurt or ("text_2" in parts and any(name.startswith(_SECOND) for name in base))
        right = right and not hurt
        path = folder / f"{expert}.safetensors"
        path.write_bytes(file)
        experts[expert] = Source(path, meant(file, form, base, kind))
        assert hurt or not isinstance(experts[expert].values, str), experts[expert].values
    return trial(folder, random, plain(folder / "base.safetensors", base), experts, right=right)


_PIPELINE = ("unet", "unet", "text", "text_2", "flux")
_BASES = {
    ("kohya", "parts of a pipeline"): (*_PIPELINE, "flux_own"),
    ("kohya", "single files"): ("single file", "single file, SDXL", "single file, Flux"),
    ("diffusers", "parts of a pipeline"): (*_PIPELINE, "flux_own"),
    ("diffusers", "single files"): ("single file", "single file, SDXL", "single file, Flux"),
}
KINDS: dict[str, outcomes.Kind] = {
    f"LoRA of {form} over {name}": lambda folder, random, form=form, bases=bases: merge(
        random.choice(bases), form, folder, random
    )
    for (form, name), bases in _BASES.items()
}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
