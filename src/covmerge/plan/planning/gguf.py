"""Plans for a GGUF file as the output: the type of each tensor, and what is copied from the base's file."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from covmerge.base.errors import CheckpointError, RecipeError
from covmerge.base.text import counted, keep_plain, some
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Quantisation
from covmerge.files.quantised.gguf import read_as
from covmerge.files.quantised.gguf_file import COUNT, GgufSettings, gguf_package
from covmerge.files.quantised.packed import DTYPE_KEYS
from covmerge.files.quantised.view import QUANTISATION
from covmerge.files.quantised.writing.gguf import HIGHER, PLAIN_TYPES, WRITTEN, GgufHead, of_gguf
from covmerge.files.quantised.writing.layouts import SAME
from covmerge.plan.planning.forms import PackedTensor
from covmerge.plan.planning.types import Formed
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Output, Recipe

GGUF = "gguf"
_FULL = "F32"
# llama.cpp leaves these in float32 too.
_STAY = ("position_embd.weight", "token_types.weight")
_ROUTERS = "ffn_gate_inp.weight"  # of every layer
_FILE_TYPE = "general.file_type"
_MOST_FIXED = 2**20  # bytes of a tensor that is no parameter, such as rotation frequencies


def is_gguf(wanted: str, base: Checkpoint) -> bool:
    """Return whether the output is a GGUF file."""
    return wanted.partition("-")[0] == GGUF or (wanted == SAME and _settings(base) is not None)


def _settings(base: Checkpoint) -> GgufSettings | None:
    settings = None if base.quantisation is None else base.quantisation.settings
    return settings if isinstance(settings, GgufSettings) else None


def as_gguf(recipe: Recipe, tensors: Sequence[TensorPlan], base: Checkpoint) -> Formed:
    """Return the tensors with the types that the recipe asks for."""
    wanted, keep = recipe.output.quantise, recipe.output.keep
    settings, quantisation = _settings(base), base.quantisation
    if settings is None or quantisation is None:
        raise RecipeError(
            f"`quantise: {wanted}` writes the base's GGUF file with other weights, with its tokenizer and "
            f"its metadata, and {base.source} is none: pass one as base, or merge without `quantise` and "
            "convert the output (convert_hf_to_gguf.py)"
        )
    if recipe.output.shard_size != Output.model_fields["shard_size"].default:
        raise RecipeError(
            f"`quantise: {wanted}` writes one GGUF file: leave out `shard_size`, and divide the output by "
            "llama.cpp's gguf-split if a client wants that"
        )
    types = settings.types
    names = {tensor.name: quantisation.packed[tensor.name].stored[0] for tensor in tensors}
    held = {name: types[stored] for name, stored in names.items()}
    by_keep = {name for name in names if any(fnmatchcase(name, pattern) for pattern in keep)}
    headers = quantisation.stored.headers
    matrices = {name for name, stored in names.items() if len(headers[stored].shape) > 1}
    plain = _plain_type(recipe, quantisation)
    kinds = dict(zip(names, _kinds(wanted, names, held, matrices), strict=True))
    kinds |= {name: plain for name in by_keep & matrices}
    _check_made(wanted, kinds, base.source)
    _check_stacks(settings.stacks, {stored: (name, kinds[name]) for name, stored in names.items()})
    dtype = _dtype(recipe, base, quantisation, {kinds[name] for name in matrices})
    formed = {t.name: _formed(t, quantisation, kinds[t.name], held[t.name], dtype) for t in tensors}
    unfit = [tensor for tensor in tensors if formed[tensor.name] is None]
    if unfit:
        name, shape = unfit[0].name, list(unfit[0].output.shape)
        raise CheckpointError(
            f"'{name}' is {shape}, and {kinds[name]} packs rows of whole blocks of 32: "
            f"{keep_plain(tensor.name for tensor in unfit)}, or choose another type"
        )
    done = tuple(filter(None, formed.values()))
    types = {**types, **{names[name]: kind for name, kind in kinds.items()}}
    notes = tuple(_notes(held, kinds, by_keep))
    return Formed(done, notes, gguf=_head(settings, quantisation, types))


def _kinds(
    wanted: str, names: Mapping[str, str], held: Mapping[str, str], matrices: set[str]
) -> Iterator[str]:
    """Yield the type of each tensor.

    If the recipe names a type, all matrices get it. Matrices in float32 stay so if the base has
    others in fewer bits, because llama.cpp or the file's author had a reason for that.
    """
    all_full = all(held[name] == _FULL for name in matrices)
    for name, stored in names.items():
        stays = name not in matrices or stored in _STAY or stored.endswith(_ROUTERS)
        if wanted in (SAME, GGUF):
            yield own_or_higher(held[name]) if wanted == GGUF else held[name]
        elif stays or (held[name] == _FULL and not all_full):
            yield held[name]
        else:
            yield wanted.partition("-")[2].upper()


def own_or_higher(kind: str) -> str:
    """Return a type if it can be written, else the next higher type that can.

    Example:
        >>> own_or_higher("Q8_0"), own_or_higher("Q4_K")
        ('Q8_0', 'Q5_0')
    """
    return kind if kind in WRITTEN else HIGHER.get(kind, kind)


def _check_made(wanted: str, kinds: Mapping[str, str], source: str) -> None:
    lacking = {name: kind for name, kind in kinds.items() if kind not in WRITTEN}
    if not lacking:
        return
    counts = Counter(lacking.values())
    said = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
    higher = ", ".join(f"{kind} becomes {HIGHER[kind]}" for kind in counts if kind in HIGHER)
    raise RecipeError(
        f"`quantise: {wanted}`: {source} has {counted(len(lacking), 'tensor')} of types that the package "
        f"gguf does not make ({said}; {some(lacking, 3, quoted=True)}), only llama.cpp does. "
        + (f"`quantise: gguf` writes the next higher type ({higher})" if higher else "Name a type")
        + "; `gguf-q8_0` writes one type; or write gguf-f16, and quantise it by llama-quantize"
    )


def _check_stacks(
    stacks: Mapping[str, tuple[str, ...]], given: Mapping[str, tuple[str, str]]
) -> None:
    """Raise if the matrices of a stack of experts would have several types.

    Args:
        stacks: see `GgufHead`.
        given: for each stored name, the tensor's name and its type.
    """
    for stack, members in stacks.items():
        first, kind = given[members[0]]
        for name, other in (given[member] for member in members):
            if other != kind:
                raise RecipeError(
                    f"`keep` makes '{first}' {kind} and '{name}' {other}, and a GGUF file has one type for "
                    f"all experts of a layer ('{stack}'): keep all of them or none"
                )


def _plain_type(recipe: Recipe, base: Quantisation) -> str:
    stored = recipe.output.dtype
    if stored != "base":
        return PLAIN_TYPES[getattr(torch, stored)]
    return PLAIN_TYPES[next(iter(base.packed.values())).header.dtype]


def _dtype(recipe: Recipe, base: Checkpoint, packed: Quantisation, kinds: set[str]) -> torch.dtype:
    """Return the dtype that the file will be read as, from the config.json that will be beside it."""
    config = {k: v for k, v in (packed.stored.config or {}).items() if k != QUANTISATION}
    if not config:  # a config.json is written from the base file's metadata
        config = dict(base.config or {})
    stated = [k for k in DTYPE_KEYS if k in config]
    if stated and recipe.output.dtype != "base":
        config = {stated[0]: recipe.output.dtype}
    return read_as(config, kinds)


def _formed(
    tensor: TensorPlan, base: Quantisation, kind: str, held: str, dtype: torch.dtype
) -> TensorPlan | None:
    """Return the tensor in the form of its type; None: its rows have no whole number of blocks."""
    output = replace(tensor.output, dtype=dtype)
    # Errors are measured in float32, as llama.cpp reads it, not in the dtype that transformers
    # rounds to.
    packed = cast("Any", base.packed[tensor.name])
    packed = replace(packed, header=replace(output, dtype=torch.float32))
    packing = of_gguf(packed, kind, base.stored.headers[packed.stored[0]].shape)
    if packing is None:
        return None
    return replace(tensor, output=output, form=PackedTensor(packing, kind == held, kind))


def _head(settings: GgufSettings, base: Quantisation, types: Mapping[str, str]) -> GgufHead:
    fixed: dict[str, tuple[TensorHeader, bytes]] = {}
    for name in sorted(base.unused):
        header = settings.tensors[name]
        if header.nbytes > _MOST_FIXED:
            raise CheckpointError(
                f"{base.stored.source}: '{name}' is no parameter, and has {header.nbytes} bytes, where "
                f"at most {_MOST_FIXED} are copied: convert the model anew"
            )
        fixed[name] = header, base.stored.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
    start = bytearray(settings.file.read(settings.start))
    changes = {COUNT: 0}  # the output is one file, whatever the base is
    if types != settings.types:
        changes[_FILE_TYPE] = _file_type(settings, types)
    for key, number in changes.items():
        if key in settings.places:
            place, form = settings.places[key]
            struct.pack_into(form, start, place, number)
    return GgufHead(bytes(start), settings.alignment, types, fixed, settings.stacks)


def _file_type(settings: GgufSettings, types: Mapping[str, str]) -> int:
    """Return GGUF's number for a file, by the type that has the most stored elements."""
    sizes = Counter[str]()
    for name, header in settings.tensors.items():
        sizes[types[name]] += header.numel
    ((most, _),) = sizes.most_common(1)
    return int(gguf_package().LlamaFileType["ALL_F32" if most == _FULL else f"MOSTLY_{most}"])


def _notes(held: Mapping[str, str], kinds: Mapping[str, str], by_keep: set[str]) -> Iterator[str]:
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).items())
    beside = f", {len(by_keep)} of them by `keep`" if by_keep else ""
    yield (
        f"{counted(len(kinds), 'tensor')} written as one GGUF file ({counts}{beside}), each weight rounded "
        "to the nearest number; metadata and tokenizer are the base's, its name too"
    )
    others: dict[tuple[str, str], list[str]] = {}
    for name, kind in kinds.items():
        if held[name] not in WRITTEN and name not in by_keep:
            others.setdefault((held[name], kind), []).append(name)
    for (old, new), tensors in others.items():
        yield (
            f"{counted(len(tensors), 'tensor')} of {old}, which only llama.cpp makes, "
            f"{'is' if len(tensors) == 1 else 'are'} written as {new}: {some(tensors, 5, quoted=True)}"
        )
