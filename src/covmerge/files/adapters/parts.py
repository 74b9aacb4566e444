"""LoRA files of diffusion models: which part of a pipeline and which tensor an update belongs to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.folds import Folded
from covmerge.files.adapters.names import Update
from covmerge.files.checkpoints.authors_layouts import Given, dotted_name, rules_of_lora
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.conversions import converted, in_authors_names, in_diffusers_names
from covmerge.files.checkpoints.pieces import Assembled, StoredTensor

# Names of a U-Net's layers in single-file checkpoints (input_blocks, ...), and diffusers' names.

_LAYERS = 2  # number of layers of a block at one resolution, in every Stable Diffusion
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
    """Return diffusers' name for a tensor of a U-Net, or None if diffusers has no such tensor.

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
    """Return diffusers' flat name for a flat name of Kohya's scripts, which have underscores for dots.

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


_PART = re.compile(
    r"(?P<flat>lora_(?:unet|te\d?|transformer|prior)_|lycoris_)"
    r"|(?:unet|transformer(?:_2)?|text_encoder(?:_\d)?|prior|diffusion_model)\."  # the last is ComfyUI's
)
_UNET = "model.diffusion_model."
# Prefixes of the parts in a single-file checkpoint of a whole pipeline, by the prefixes in LoRA files.
_REGIONS: Mapping[str, tuple[str, ...]] = {
    _UNET: (
        *("lora_unet_", "lora_transformer_", "lycoris_"),
        *("unet.", "transformer.", "diffusion_model."),
    ),
    "cond_stage_model.transformer.": ("lora_te_", "text_encoder."),
    "conditioner.embedders.0.transformer.": ("lora_te1_", "text_encoder."),
}
# Prefixes of text encoders whose names are not read, because query, key and value are one tensor:
# SDXL's second encoder, that of Stable Diffusion 2, and those of Stable Diffusion 3.
_NOT_READ: Mapping[str, tuple[str, ...]] = {
    "conditioner.embedders.1.": ("lora_te2_", "text_encoder_2."),
    "cond_stage_model.model.": ("lora_te_", "text_encoder."),
    "text_encoders.": ("lora_te", "text_encoder"),
}

_OF_UNET = _REGIONS[_UNET]
_DIFFUSERS_PART = "transformer."

# A pipeline's folders whose models may have the same names, with their prefixes in LoRA files. Files for
# Wan's second transformer have the prefix of the first.
_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("lora_te_", "lora_te1_", "text_encoder."),
    "text_encoder_2": ("lora_te2_", "text_encoder_2."),
    "text_encoder_3": ("lora_te3_", "text_encoder_3."),
    "transformer": ("transformer.",),
    "transformer_2": ("transformer_2.", "transformer."),
}
_TEXT_MODEL = "text_model."  # before CLIP's names in transformers 4, and not in transformers 5


def part_of(name: str) -> str:
    """Return the part of a pipeline that a name begins with, or an empty string.

    Example:
        >>> part_of("lora_te1_text_model_final.weight"), part_of("model.norm.weight")
        ('lora_te1_', '')
    """
    found = _PART.match(name)
    return found[0] if found else ""


def flat_name(name: str) -> str:
    """Return a name as Kohya's scripts write it, with underscores for dots.

    Example:
        >>> flat_name("mid_block.attentions.0.to_q.weight")
        'mid_block_attentions_0_to_q_weight'
    """
    return name.replace(".", "_")


def updates_of_base(
    updates: Iterable[Update | Folded],
    base: Mapping[str, TensorHeader],
    where: str,
    folders: Collection[str] = (),
) -> tuple[dict[str, Update | Folded], dict[str, int]]:
    """Find the tensors of a base that a file without a configuration updates.

    A tensor is found by its name, in which dots and underscores are equal, and by its shape,
    because both text encoders of a pipeline have the same names. The name of the base's folder may
    tell them apart too.

    Returns:
        The updates by the base's names, and for each part the number of updates without a tensor.

    Raises:
        CheckpointError: the base has tensors for some updates of a part and not for others, for no
            update at all, several for one update, or under names that are not read.
    """
    names = _Names(base)
    found: dict[str, Update | Folded] = {}
    present: set[str] = set()
    missing: defaultdict[str, list[str]] = defaultdict(list)
    changes = list(updates)
    of_authors = _of_authors(changes, base, where)
    for update in changes:
        part = part_of(update.name)
        name = None if _is_of_another(part, folders) else names.find(update, part, where)
        pieces = of_authors.get(update.name, ())
        if name is not None:
            pieces = (replace(update, name=name, written=update.name),)
        if not pieces:
            missing[part].append(update.name)
            continue
        present.add(part)
        for piece in pieces:
            if piece.name in found:
                raise CheckpointError(
                    f"{where}: '{found[piece.name].up}' and '{update.up}' are both of the base's "
                    f"'{piece.name}', and nothing says which is meant: pass the base's folder inside its "
                    "pipeline, such as text_encoder_2, or remove one part from the file"
                )
            found[piece.name] = piece
    for part, those in missing.items():
        if (region := _not_read(part, base)) is not None:
            raise CheckpointError(
                f"{where} updates '{those[0]}', and the base has that text encoder under names that are "
                f"not read ('{region}...'): merge into the folders of the pipeline (diffusers: "
                "pipe.save_pretrained), or remove the tensors of this part from a copy of the adapter"
            )
        if part in present or not present:
            raise CheckpointError(
                f"{where} updates '{those[0]}', and the base has no such tensor, or of another shape, "
                "or is another part of the pipeline: pass the base that the adapter was trained on"
            )
    return found, {part: len(those) for part, those in missing.items()}


def _of_authors(
    updates: Iterable[Update | Folded], base: Mapping[str, TensorHeader], where: str
) -> dict[str, list[Update | Folded]]:
    """Return updates as pieces for diffusers' base, where a file has a transformer's authors' names.

    Query, key and value are one layer to the authors: each takes the rows of B that are its own.
    """
    named = [
        (update.name.removeprefix(part), update)
        for update in updates
        if (part := part_of(update.name)) in _OF_UNET and update.shape is not None
    ]
    rules = rules_of_lora([name for name, _ in named], base)
    stems: dict[str, Update | Folded] = {}
    for name, update in named if rules else ():
        other = stems.setdefault(stem := dotted_name(name, rules), update)
        if other is not update:
            raise CheckpointError(
                f"{where}: '{other.up}' and '{update.up}' are both of '{stem}': remove one"
            )
    shapes = {name: update.shape for name, update in stems.items() if update.shape is not None}
    matrices = {name: _matrix(header.shape) for name, header in base.items()}
    made = converted(shapes, matrices, None, rules)[0] if rules else {}
    found: defaultdict[str, list[Update | Folded]] = defaultdict(list)
    for name, one in made.items():
        update = stems[next(iter(one.stored()))]
        written = f"{_DIFFUSERS_PART}{name}"
        if isinstance(one, StoredTensor):
            found[update.name].append(replace(update, name=name, written=written))
        elif isinstance(update, Update):
            rows = tuple(map(int, one.all(_numbers_of_rows).flatten()))
            piece = replace(update, name=name, shape=one.shape, order=rows, written=written)
            found[update.name].append(piece)
    # All rows of an update must have a place.
    return {
        update.name: found[update.name]
        for update in stems.values()
        if sum(piece.shape[0] for piece in found[update.name] if piece.shape)
        == (update.shape or (0,))[0]
    }


def in_layout_of(
    names: Iterable[str], folded: Iterable[str], base: Checkpoint
) -> tuple[Checkpoint, Sequence[Given]]:
    """Return a transformer in the pieces that a file's names have, and the rules that lead back.

    Files with diffusers' names are read over a base that has the authors'. Layers that are `folded`, under
    the authors' names, are read over diffusers' base. Other bases are returned unchanged.
    """
    shapes = {name: header.shape for name, header in base.headers.items()}
    stems = [name.removeprefix(part_of(name)) for name in names]
    made = in_diffusers_names(shapes)
    known = {flat_name(name.removeprefix(_UNET)) for name in shapes}
    if {flat_name(name) for name in stems} & ({flat_name(name) for name in made} - known):
        return Assembled(base, made), ()
    inner = [name.removeprefix(part) for name in folded if (part := part_of(name)) in _OF_UNET]
    rules = rules_of_lora(inner, shapes)
    made = in_authors_names({dotted_name(name, rules) for name in inner}, shapes, rules)
    if all(isinstance(one, StoredTensor) for one in made.values()):
        return base, ()
    return Assembled(base, made), rules


def _numbers_of_rows(_: str, rows: range) -> Tensor:
    return torch.tensor(rows).view(-1, 1)


def _is_of_another(part: str, folders: Collection[str]) -> bool:
    """Return whether a part of a file belongs to another folder of a pipeline than the base's."""
    mine = [parts for folder, parts in _FOLDERS.items() if folder in folders]
    named = any(part in parts for parts in _FOLDERS.values())
    return named and bool(mine) and not any(part in parts for parts in mine)


def _not_read(part: str, base: Iterable[str]) -> str | None:
    """Return the prefix under which a base has a part with names that are not read, or None."""
    regions = [region for region, parts in _NOT_READ.items() if part.startswith(parts)]
    return next((r for r in regions if any(name.startswith(r) for name in base)), None)


def region_of(name: str) -> str:
    """Return the prefix of a part that a name has in a single-file checkpoint, or an empty string."""
    return next((region for region in _REGIONS if name.startswith(region)), "")


class _Names:
    """The names of a base, looked up by the names that a LoRA file may have for them."""

    def __init__(self, base: Mapping[str, TensorHeader]) -> None:
        self._base = base
        self._known: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in base:
            for region, alias in _aliases(name):
                self._known[region, flat_name(alias)].append(name)

    def find(self, update: Update | Folded, part: str, where: str) -> str | None:
        """Return the base's tensor that an update belongs to, or None."""
        stem = flat_name(update.name.removeprefix(part))
        regions = ["", *(region for region, parts in _REGIONS.items() if part in parts)]
        # Kohya's scripts name SDXL's layers as in single files, even if the base is a folder of
        # diffusers.
        stems = [stem, flat_diffusers_name(stem)] if part in _OF_UNET else [stem]
        stems.append(stem.removeprefix(flat_name(_TEXT_MODEL)))
        known = [self._known.get((region, key or ""), ()) for region in regions for key in stems]
        found = list(dict.fromkeys(name for names in known for name in names))
        shapes = {name: _matrix(self._base[name].shape) for name in found}
        found = [n for n in found if update.shape is None or shapes[n] == update.shape]
        exact = [name for name in found if update.name.endswith(name)]
        if len(found) > 1 and len(exact) != 1:
            raise CheckpointError(
                f"{where}: '{update.name}' could be {' or '.join(found)} of the base, and nothing says "
                "which: save the adapter with the names of its modules"
            )
        return (exact or found)[0] if found else None


def _aliases(name: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a pipeline that a tensor may belong to, each with the tensor's name there."""
    yield "", name
    yield "", name.removeprefix(_TEXT_MODEL)
    for region in _REGIONS:
        if name.startswith(region):
            inner = name.removeprefix(region)
            yield region, inner
            yield region, inner.removeprefix(_TEXT_MODEL)
            if region == _UNET and (other := diffusers_name(inner)) is not None:
                yield region, other


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], prod(shape[1:])) if shape else ()
