"""LoRA files of diffusion models: which part of a pipeline an update is of, and which tensor of a base."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.folds import Folded
from covmerge.files.adapters.ldm_names import diffusers_name, flat_diffusers_name
from covmerge.files.adapters.names import Update

_PART = re.compile(
    r"(?P<flat>lora_(?:unet|te\d?|transformer|prior)_|lycoris_)"
    r"|(?:unet|transformer(?:_2)?|text_encoder(?:_\d)?|prior|diffusion_model)\."  # the last is ComfyUI's
)
_UNET = "model.diffusion_model."
# Where a single-file checkpoint of a whole pipeline has its parts.
_REGIONS: Mapping[str, tuple[str, ...]] = {
    _UNET: (
        *("lora_unet_", "lora_transformer_", "lycoris_"),
        *("unet.", "transformer.", "diffusion_model."),
    ),
    "cond_stage_model.transformer.": ("lora_te_", "text_encoder."),
    "conditioner.embedders.0.transformer.": ("lora_te1_", "text_encoder."),
}
# Where it has text encoders under other names, with query, key and value in one tensor: SDXL's second one,
# that of Stable Diffusion 2, and those of Stable Diffusion 3.
_NOT_READ: Mapping[str, tuple[str, ...]] = {
    "conditioner.embedders.1.": ("lora_te2_", "text_encoder_2."),
    "cond_stage_model.model.": ("lora_te_", "text_encoder."),
    "text_encoders.": ("lora_te", "text_encoder"),
}

_OF_UNET = _REGIONS[_UNET]


def part_of(name: str) -> str:
    """Return the part of a pipeline that a name begins with, or nothing.

    Example:
        >>> part_of("lora_te1_text_model_final.weight"), part_of("model.norm.weight")
        ('lora_te1_', '')
    """
    found = _PART.match(name)
    return found[0] if found else ""


def flat_name(name: str) -> str:
    """Return a name as Kohya's scripts flatten it.

    Example:
        >>> flat_name("mid_block.attentions.0.to_q.weight")
        'mid_block_attentions_0_to_q_weight'
    """
    return name.replace(".", "_")


def updates_of_base(
    updates: Iterable[Update | Folded], base: Mapping[str, TensorHeader], where: str
) -> tuple[dict[str, Update | Folded], dict[str, int]]:
    """Find the tensors of a base that the updates of a file without configuration are of.

    A tensor is found by its name, dots and underscores being alike, and by its shape: both text
    encoders of a pipeline have the same names.

    Args:
        updates: of the file.
        base: headers of a part of a pipeline, or of a whole one in a single file.
        where: the adapter, for errors.

    Returns:
        The updates by the base's names, and how many of which part the base has no tensor for.

    Raises:
        CheckpointError: the base has tensors for some updates of a part and not for others, for none
            at all, several for one, or under names that are not read.
    """
    names = _Names(base)
    found: dict[str, Update | Folded] = {}
    present: set[str] = set()
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for update in updates:
        part = part_of(update.name)
        if (name := names.find(update, part, where)) is None:
            missing[part].append(update.name)
        elif name in found:
            raise CheckpointError(
                f"{where}: '{found[name].up}' and '{update.up}' are both of the base's '{name}', and "
                "nothing says which is meant: remove one part from the file"
            )
        else:
            found[name] = replace(update, name=name, written=update.name)
            present.add(part)
    for part, those in missing.items():
        if (region := _not_read(part, base)) is not None:
            raise CheckpointError(
                f"{where} updates '{those[0]}', and the base has that text encoder under names that are "
                f"not read ('{region}...'): merge into the folders of the pipeline (diffusers: "
                "pipe.save_pretrained), or remove the tensors of this part from a copy of the adapter"
            )
        if part in present or not present:
            raise CheckpointError(
                f"{where} updates '{those[0]}', and the base has no such tensor, or of another shape: pass "
                "the base that the adapter was trained on"
            )
    return found, {part: len(those) for part, those in missing.items()}


def _not_read(part: str, base: Iterable[str]) -> str | None:
    """Where a base has a part under names that are not read; None: it has none of it."""
    regions = [region for region, parts in _NOT_READ.items() if part.startswith(parts)]
    return next((r for r in regions if any(name.startswith(r) for name in base)), None)


def region_of(name: str) -> str:
    """Return what a tensor's name begins with in a single-file checkpoint of a pipeline, or nothing."""
    return next((region for region in _REGIONS if name.startswith(region)), "")


class _Names:
    """The names of a base, by those that a file may have for them."""

    def __init__(self, base: Mapping[str, TensorHeader]) -> None:
        self._base = base
        self._known: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in base:
            for region, alias in _aliases(name):
                self._known[region, flat_name(alias)].append(name)

    def find(self, update: Update | Folded, part: str, where: str) -> str | None:
        """Return the tensor that an update is of; None: there is none."""
        stem = flat_name(update.name.removeprefix(part))
        regions = ["", *(region for region, parts in _REGIONS.items() if part in parts)]
        # Kohya's scripts name SDXL's layers as single files do, also over a folder of diffusers.
        stems = [stem, flat_diffusers_name(stem)] if part in _OF_UNET else [stem]
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
    """The places of a pipeline that a tensor may be looked for in, each with its name there."""
    yield "", name
    for region in _REGIONS:
        if name.startswith(region):
            inner = name.removeprefix(region)
            yield region, inner
            if region == _UNET and (other := diffusers_name(inner)) is not None:
                yield region, other


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], prod(shape[1:])) if shape else ()
