"""Decisions on a quantised output: which tensors are packed, how, and config.json's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from covmerge.base.errors import CheckpointError, RecipeError, pattern_meant
from covmerge.base.text import counted, keep_plain, some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Quantisation
from covmerge.files.quantised.packed import DTYPE_KEYS, dtype_of
from covmerge.files.quantised.writing.layouts import LAYOUTS, SAME, with_plain
from covmerge.files.quantised.writing.like import as_stored, is_written
from covmerge.plan.planning.forms import PackedTensor
from covmerge.plan.planning.gguf import as_gguf, is_gguf
from covmerge.plan.planning.types import Formed
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Recipe

_GPT_OSS = "gpt_oss"
# A head tied to the embedding is not stored, but a list of plain layers must name it.
_TIED_HEAD = "lm_head"
_OF_EXPERTS = "fp8-block"  # transformers loads experts stored separately only in this format


def quantised(recipe: Recipe, tensors: tuple[TensorPlan, ...], base: Checkpoint) -> Formed:
    """Return the tensors with those packed that the recipe asks for."""
    wanted, keep = recipe.output.quantise, recipe.output.keep
    if wanted == "none":
        return Formed(tensors)
    if any(tensor.form.masks for tensor in tensors):
        raise RecipeError(
            f"method '{recipe.method}' writes masks beside plain weights: leave out `quantise`"
        )
    quantisation = base.quantisation
    if quantisation is not None and quantisation.derived:
        raise RecipeError(
            "`quantise` goes by the base's own layers and tokens, and the base is quantised and seen "
            "through `slices` or a `tokenizer`: merge without `quantise`, and quantise the output by a "
            "merge of it alone (`base: null`, method passthrough)"
        )
    if is_gguf(wanted, base):
        if base.untied is not None:
            raise RecipeError(
                f"`quantise: {wanted}` writes the base's GGUF file with other weights, and some expert "
                f"changes tensors that {base.source} ties: merge without `quantise`, and convert the "
                "output (convert_hf_to_gguf.py)"
            )
        made = as_gguf(recipe, tensors, base)
        for pattern in keep:
            _check_pattern(pattern, [tensor.name for tensor in tensors])
        return made
    if base.config is None:
        raise RecipeError(
            f"`quantise: {wanted}` has to be said in config.json, and {base.source} has none: pass the "
            "folder of a whole model as base"
        )
    # `None` keeps the base's dtypes: bitsandbytes' 4-bit tensors each have one. Otherwise
    # config.json's is used.
    as_there = wanted == SAME and recipe.output.dtype == "base"
    dtype = None if as_there else _read_as(recipe, base.config)
    same = _as_base(base) if wanted == SAME else None
    packable = set(same.packed) if same else _by_name(wanted, tensors, base)
    by_keep = {name for name in packable if any(fnmatchcase(name, pattern) for pattern in keep)}
    chosen = packable - by_keep
    if same is None:
        _check_sizes(wanted, [tensor.output for tensor in tensors if tensor.name in chosen])
    done = [_packed(wanted, t, base, same, dtype) if t.name in chosen else t for t in tensors]
    packed = [tensor for tensor in done if tensor.name in chosen]
    if not packed:
        raise RecipeError(
            f"`quantise: {wanted}` with these `keep` leaves no tensor that is packed: keep fewer of them, "
            "or leave out `quantise`"
        )
    _check_experts(packed, [tensor for tensor in done if tensor.name in by_keep])
    settings = _settings(wanted, same, done, packed, by_keep)
    unused = [p for p in keep if not any(fnmatchcase(name, p) for name in packable)]
    for pattern in unused:
        _check_pattern(pattern, [tensor.name for tensor in tensors])
    notes = tuple(_notes(wanted, done, packed, by_keep, unused))
    return Formed(tuple(done), notes, settings=settings)


def _read_as(recipe: Recipe, config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that packed weights are read as: the one that config.json will state."""
    stated = [key for key in DTYPE_KEYS if key in config]
    if recipe.output.dtype == "base" or not stated:
        return dtype_of(config)
    return dtype_of({stated[0]: recipe.output.dtype})


def _as_base(base: Checkpoint) -> Quantisation:
    stored = base.quantisation
    if stored is None:
        raise RecipeError(
            f"`quantise: {SAME}` writes the base's own format, and {base.source} is not quantised: name "
            f"one ({', '.join(LAYOUTS)})"
        )
    other = next((name for name, packed in stored.packed.items() if not is_written(packed)), None)
    if other is not None:
        raise RecipeError(
            f"`quantise: {SAME}`: {base.source} stores '{other}' in a way that is read and not written: "
            "name a format that is, such as fp8-channel, or leave `quantise` out"
        )
    if stored.unused:
        raise RecipeError(
            f"`quantise: {SAME}`: {base.source} has scales of activations ('{min(stored.unused)}'), which "
            "were measured on it and are no merged model's: name a format without them, such as fp8-channel"
        )
    return stored


def _by_name(wanted: str, tensors: Sequence[TensorPlan], base: Checkpoint) -> set[str]:
    """Return names of tensors that a format packs: of those packed in the base, or of linear layers."""
    packable = {tensor.name for tensor in tensors if _is_packable(wanted, tensor)}
    if base.quantisation is not None:
        packable &= set(base.quantisation.packed)
    if wanted == "mxfp4" and (base.config or {}).get("model_type") != _GPT_OSS:
        raise RecipeError(
            "`quantise: mxfp4`: clients load it of GPT-OSS alone, and this is another model; choose one of "
            f"{', '.join(name for name in LAYOUTS if name != wanted)}"
        )
    if not packable:
        raise RecipeError(
            f"`quantise: {wanted}`: no tensor is the weight of a layer that clients pack (linear layers, "
            "as transformers builds them of config.json, but for heads and embeddings)"
        )
    return packable


def _is_packable(wanted: str, tensor: TensorPlan) -> bool:
    if tensor.output.module is not None:  # the module's own library reads it plain
        return False
    if wanted == "mxfp4":
        axes = len(tensor.output.shape)
        return tensor.info.role is Role.EXPERT_STACK and axes == LAYOUTS[wanted].axes
    # transformers' quantisers leave a head plain, also one that is no output embedding.
    if not _is_linear(tensor) or tensor.info.stays_full or tensor.info.outside_backbone:
        return False
    return tensor.info.takes_factors or (wanted == _OF_EXPERTS and _is_an_expert(tensor))


def _is_linear(tensor: TensorPlan) -> bool:
    matrix = len(tensor.output.shape) == 2 and tensor.name.endswith(".weight")
    return matrix and tensor.info.role is Role.LINEAR


def _is_an_expert(tensor: TensorPlan) -> bool:
    """Return whether transformers joins a tensor with others on loading."""
    return tensor.name.endswith(".weight") and not tensor.info.parameter.endswith(".weight")


def _packed(
    wanted: str,
    tensor: TensorPlan,
    base: Checkpoint,
    same: Quantisation | None,
    dtype: torch.dtype | None,
) -> TensorPlan:
    output = tensor.output if dtype is None else replace(tensor.output, dtype=dtype)
    packing = LAYOUTS[wanted].packing(output) if same is None else as_stored(same, output)
    assert packing is not None  # checked by _check_sizes
    as_base = same is not None and output == base.headers[tensor.name]
    return replace(tensor, output=output, form=PackedTensor(packing, as_base, wanted))


def _check_sizes(wanted: str, headers: Sequence[TensorHeader]) -> None:
    """Raise if a format cannot pack matrices of some sizes; the message names all such tensors."""
    layout = LAYOUTS[wanted]
    unfit = [header for header in headers if layout.packing(header) is None]
    if unfit:
        raise CheckpointError(
            f"'{unfit[0].name}' is {list(unfit[0].shape)}, and {wanted} packs {layout.needs}: "
            f"{keep_plain(header.name for header in unfit)}, or choose another format"
        )


def _check_experts(packed: Sequence[TensorPlan], plain: Sequence[TensorPlan]) -> None:
    modules = {_joined(tensor): tensor.name for tensor in packed if _is_an_expert(tensor)}
    for tensor in plain:
        other = modules.get(_joined(tensor))
        if other is not None and _is_an_expert(tensor):
            raise RecipeError(
                f"`keep` has '{tensor.name}' and not '{other}', which are one module once they are loaded: "
                "keep both or none"
            )


def _settings(
    wanted: str,
    same: Quantisation | None,
    tensors: Sequence[TensorPlan],
    packed: Sequence[TensorPlan],
    by_keep: set[str],
) -> dict[str, Any]:
    """Return config.json's settings, which name every linear layer that is plain."""
    kept = [tensor for tensor in tensors if tensor.name in by_keep]
    if same is not None:
        if not kept:
            return {**same.settings}
        # A missing list in the config means defaults, which no longer hold once the list exists.
        heads = [tensor for tensor in tensors if tensor.info.role is Role.OUTPUT]
        return with_plain(same.settings, [*_modules([*heads, *kept]), _TIED_HEAD])
    names = {tensor.name for tensor in packed}
    layers = [
        tensor
        for tensor in tensors
        if tensor.name not in names
        and tensor.output.module is None
        and (_is_linear(tensor) or tensor.info.role in (Role.OUTPUT, Role.HEAD, Role.EMBEDDING))
        and tensor.name.endswith(".weight")
    ]
    settings = {**LAYOUTS[wanted].settings}
    if settings.get("load_in_4bit"):
        dtype = packed[0].output.dtype
        settings["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
    return with_plain(settings, [*_modules([*layers, *kept]), _TIED_HEAD])


def _modules(tensors: Sequence[TensorPlan]) -> Iterator[str]:
    for tensor in tensors:
        yield tensor.name.rpartition(".")[0]
        if _is_an_expert(tensor):
            yield _joined(tensor)


def _joined(expert: TensorPlan) -> str:
    """Return the module that an expert is part of once it is loaded."""
    return expert.info.parameter.rpartition(".")[0]


def _notes(
    wanted: str,
    tensors: Sequence[TensorPlan],
    packed: Sequence[TensorPlan],
    by_keep: set[str],
    unused: Sequence[str],
) -> Iterator[str]:
    said = "the base's own format" if wanted == SAME else f"{wanted}: {LAYOUTS[wanted].said}"
    plain = len(tensors) - len(packed)
    yield (
        f"{counted(len(packed), 'tensor')} written quantised ({said}), each weight rounded to the nearest "
        f"number; {plain} plain" + (f", {len(by_keep)} of them by `keep`" if by_keep else "")
    )
    experts = [tensor.name for tensor in tensors if tensor not in packed and _is_an_expert(tensor)]
    if experts and wanted != SAME and not by_keep.issuperset(experts) and wanted != "mxfp4":
        yield (
            f"experts that are stored one by one stay plain in this format ({some(experts, 2)}): "
            f"transformers puts them together, and loads them of {_OF_EXPERTS} alone"
        )
    full = [tensor.name for tensor in tensors if tensor.info.stays_full and _is_linear(tensor)]
    if full and wanted != SAME:
        yield (
            f"{counted(len(full), 'layer stays', 'layers stay')} plain, which transformers keeps in "
            f"float32 and loads packed in no format ({some(full, 2)})"
        )
    for pattern in unused:
        yield f"`keep` has '{pattern}', which is plain in {wanted} anyway"


def _check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Raise if a pattern matches no tensor: what it should keep would be rounded irreversibly."""
    if any(fnmatchcase(name, pattern) for name in names):
        return
    raise RecipeError(
        f"`keep` has '{pattern}', which matches no tensor: {pattern_meant(pattern, names)}"
    )
