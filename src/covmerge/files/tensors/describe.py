"""The description of a checkpoint: what each of its tensors is in the model, decided once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.base.types import Module, Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.modules import Kind
from covmerge.files.tensors.names import (
    in_rows_of_blocks,
    is_head_by_name,
    kind_by_name,
    parts_by_name,
)
from covmerge.files.tensors.remembered import remembered_skeleton
from covmerge.files.tensors.skeleton import Skeleton, SkeletonUnavailable, architecture_of
from covmerge.files.tensors.views import FusedParts, MatrixLayout

_MATRICES = (Role.LINEAR, Role.CONV1D, Role.CONV, Role.EXPERT_STACK)


@dataclass(frozen=True)
class TensorInfo:
    """What one stored tensor is in its model."""

    name: str  # the stored name
    # The tensor's role. `head` is not decided here, because that needs a comparison of checkpoints.
    role: Role
    why: str  # the facts from which the role was concluded
    # How it holds `(d_out, d_in)` matrices, each taken whole; meaningless for norms, biases,
    # buffers and other tensors.
    layout: MatrixLayout
    # The split of its rows if it is a known fused projection, for `MatrixLayout.parts`; else None.
    parts: FusedParts | None
    # The tensor with which it shares memory, according to the config. If both are stored, their
    # values may contradict the config, which only a reader of the values can see.
    tied_to: str | None
    outside_backbone: bool  # whether it lies outside the base model: a task head, an output layer
    # Whether it lies in a sequence of blocks, by its name, and inside the base model.
    in_blocks: bool
    # Its name in the model that transformers builds; the stored name if that is unknown.
    parameter: str
    takes_factors: bool  # whether it is the weight of a layer for which PEFT has factors
    stays_full: bool  # whether transformers never quantises it
    # Whether it is a buffer that the model's code creates again whenever the model is loaded.
    rebuilt: bool


@dataclass(frozen=True)
class ModelDescription:
    """The description of all tensors of a checkpoint."""

    tensors: Mapping[str, TensorInfo]  # the descriptions of the stored tensors, in their order
    # What a model with a head puts before the names of its base model ("bert", "transformer",
    # "model"); None if unknown.
    prefix: str | None
    family: str | None  # see `family_of`
    # For each tied name, stored or not, the name with which it shares memory. That is the first
    # stored name of its group, or the first defined one if none is stored.
    tied: Mapping[str, str]
    # Name of the output layer's weight if the model has an output layer, the config does not tie
    # it, and it is not stored, so that the model cannot be loaded; else None.
    lacks_head: str | None
    architecture: str | None  # config.architectures[0]
    # Paths of models inside the model, each with its class and its model_type.
    parts: Mapping[str, tuple[str, str]]
    # Whether roles come from the model's modules (`skeleton`) or from name rules (`names`).
    source: Literal["skeleton", "names"]
    notes: tuple[str, ...]  # for the user


def family_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the model family by which papers choose their defaults: model_type, with a size for RoBERTa.

    Example:
        >>> family_of({"model_type": "roberta", "hidden_size": 1024}), family_of({})
        ('roberta-large', None)
    """
    model_type = (config or {}).get("model_type")
    if not isinstance(model_type, str):
        return None
    if config is not None and model_type == "roberta":
        size = {768: "base", 1024: "large"}.get(config.get("hidden_size", 768))
        return f"roberta-{size}" if size else model_type
    return model_type


def describe_checkpoint(checkpoint: Checkpoint) -> ModelDescription:
    """Describe every stored tensor of a checkpoint; the model's skeleton may come from the cache.

    Example:
        >>> import torch
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> describe_checkpoint(open_checkpoint({"fc.weight": torch.zeros(3, 2)})).source
        'names'
    """
    parts: dict[Module | None, dict[str, TensorHeader]] = {}
    for name, header in checkpoint.headers.items():
        parts.setdefault(header.module, {})[name] = header
    if not {*parts} - {None}:
        return describe(checkpoint.headers, checkpoint.config, shared=checkpoint.shared)
    described = [
        describe(headers, checkpoint.config) if module is None else _of_module(module, headers)
        for module, headers in parts.items()
    ]
    tensors = {name: info for part in described for name, info in part.tensors.items()}
    return replace(
        described[0],
        tensors={name: tensors[name] for name in checkpoint.headers},
        prefix=described[0].prefix if None in parts else None,
        tied={name: to for part in described for name, to in part.tied.items()},
        lacks_head=next(filter(None, (part.lacks_head for part in described)), None),
        notes=tuple(note for part in described for note in part.notes),
    )


def _of_module(module: Module, headers: Mapping[str, TensorHeader]) -> ModelDescription:
    """Describe the tensors of one module of a model, under their names in the whole model."""
    stored = {header.in_module.name: header.in_module for header in headers.values()}
    is_model = module.is_of_transformers
    found = describe(stored, module.config if is_model else None)

    def whole(name: str) -> str:
        return f"{module.prefix}{name}"

    tensors = {
        whole(name): replace(
            info,
            name=whole(name),
            tied_to=info.tied_to and whole(info.tied_to),
            parameter=whole(info.parameter),
            outside_backbone=is_model and info.outside_backbone,
            in_blocks=is_model and info.in_blocks,
        )
        for name, info in found.tensors.items()
    }
    return replace(
        found,
        tensors=tensors,
        tied={whole(name): whole(to) for name, to in found.tied.items()},
        lacks_head=found.lacks_head and whole(found.lacks_head),
        notes=tuple(f"{module.folder}: {note}" for note in found.notes) if is_model else (),
    )


def describe(
    headers: Mapping[str, TensorHeader],
    config: Mapping[str, Any] | None,
    *,
    shared: Mapping[str, str] = MappingProxyType({}),
) -> ModelDescription:
    """Describe every stored tensor; `shared`: those that share memory, tied if there is no config.

    Roles come from the classes of the model's modules, which are built without memory from config.json. If
    there is no config, or transformers is not installed, they come from rules on the names. `source` and
    `notes` say which, and each tensor's `why` says what decided its role.

    Example:
        >>> import torch
        >>> header = TensorHeader("blocks.0.mlp.c_fc.weight", (32, 8), torch.float32)
        >>> info = describe({header.name: header}, None).tensors[header.name]
        >>> str(info.role), info.why
        ('linear', "name rule '2-D weight'")
    """
    skeleton, notes = _skeleton(headers, config)
    found = {name: _identify(header, headers, skeleton) for name, header in headers.items()}
    unsure = [name for name, (kind, _) in found.items() if kind.unsure]
    if unsure:
        notes.append(
            f"{some(unsure, 1, quoted=True)}: {found[unsure[0]][0].why}; taken for '{Role.OTHER}'"
        )
    split = [name for name, (_, parts) in found.items() if parts is not None]
    if split and config is None:
        notes.append(
            f"{counted(len(split), 'matrix is', 'matrices are')} known by name for q, k and v in one "
            f"({some(split, 1, quoted=True)}): merged whole, or apart with "
            f"{Hint('tensors', {'fused': 'split'})}"
        )
    outside, blocks = _outside(headers, skeleton), in_rows_of_blocks(headers)
    tied = _tied(headers, skeleton) if skeleton else dict(shared)
    lacks_head = _lacking(headers, skeleton, tied) if skeleton else None
    if config is not None and has_own_head(config):
        # transformers still ties T5's output, and unties it if the stored values differ.
        outputs = {name for name, (kind, _) in found.items() if kind.role is Role.OUTPUT}
        tied = {name: to for name, to in tied.items() if name not in outputs}
    tensors = {
        name: TensorInfo(
            name=name,
            role=kind.role,
            why=kind.why,
            layout=MatrixLayout(kind.transposed, stacked=kind.role is Role.EXPERT_STACK),
            parts=parts,
            tied_to=tied.get(name),
            outside_backbone=name in outside,
            in_blocks=name in blocks and name not in outside,
            parameter=skeleton.places[name].parameter
            if skeleton and name in skeleton.places and not skeleton.places[name].divided
            else name,
            takes_factors=kind.takes_factors
            if skeleton and name in skeleton.places
            else _takes_factors_by_name(name, kind, headers),
            stays_full=kind.stays_full,
            rebuilt=kind.rebuilt,
        )
        for name, (kind, parts) in found.items()
    }
    if skeleton:
        notes += _misfits(headers, tensors, skeleton)
    return ModelDescription(
        tensors=tensors,
        prefix=skeleton.prefix if skeleton else None,
        family=family_of(config),
        tied=tied,
        lacks_head=lacks_head,
        architecture=architecture_of(config),
        parts=skeleton.parts if skeleton else {},
        source="skeleton" if skeleton else "names",
        notes=tuple(notes),
    )


# transformers 5 writes `"tie_word_embeddings": true` for these models whether they are tied or not.
_ALWAYS_SAID_TIED = ("mt5", "udop", "umt5")


def has_own_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config says that a stored head is no copy of the embedding.

    Example:
        >>> has_own_head({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False})
        True
    """
    # A tied T5 scales its outputs, one with its own head does not (False). Only this key is reliable.
    if config.get("tie_word_embeddings") is False or config.get("scale_decoder_outputs") is False:
        return True
    release = str(config.get("transformers_version"))
    return config.get("model_type") in _ALWAYS_SAID_TIED and release.startswith("5.")


def conv1d_names(description: ModelDescription) -> frozenset[str] | None:
    """Return the names, as stored and in the model, of layers that are stored as `(d_in, d_out)`.

    Names are given with and without the prefix that a model with a head has. None: the modules are unknown.
    """
    if description.source != "skeleton":
        return None
    prefix = f"{description.prefix}."
    found = [info for info in description.tensors.values() if info.role is Role.CONV1D]
    names = {name for info in found for name in (info.name, info.parameter)}
    bare = {name.removeprefix(prefix) for name in names}
    return frozenset({*names, *bare, *(prefix + name for name in bare)})


def _takes_factors_by_name(name: str, kind: Kind, headers: Mapping[str, TensorHeader]) -> bool:
    module, _, leaf = name.rpartition(".")
    layer = kind.role in (Role.LINEAR, Role.CONV1D, Role.OUTPUT, Role.EMBEDDING)
    # The output projection of nn.MultiheadAttention is excluded: it is not called as a layer.
    inside = f"{module.rpartition('.')[0]}.in_proj_weight" in headers
    return layer and leaf == "weight" and not inside


def _skeleton(
    headers: Mapping[str, TensorHeader], config: Mapping[str, Any] | None
) -> tuple[Skeleton | None, list[str]]:
    """Return the skeleton that knows these tensors, or None, and notes."""
    if config is None:
        return None, ["there is no config.json: roles come from name rules"]
    try:
        skeleton = remembered_skeleton(headers, config)
    except SkeletonUnavailable as reason:
        return None, [f"{reason}: roles come from name rules"]
    if headers and not skeleton.places:
        reason = f"{skeleton.architecture} has no tensor of any of the stored names"
        return None, [f"{reason}: roles come from name rules"]
    return skeleton, list(skeleton.notes)


def _identify(
    header: TensorHeader, headers: Mapping[str, TensorHeader], skeleton: Skeleton | None
) -> tuple[Kind, FusedParts | None]:
    if header.complex:
        return Kind(Role.OTHER, "complex numbers, by real and imaginary part"), None
    place = skeleton.places.get(header.name) if skeleton else None
    if not header.dtype.is_floating_point:
        known = kind_by_name(header, headers) if place is None else place.kind
        why = f"dtype {str(header.dtype).removeprefix('torch.')}"
        return Kind(Role.BUFFER, why, rebuilt=known.rebuilt), None
    if place is not None:
        return place.kind, place.parts
    kind = kind_by_name(header, headers)
    return kind, parts_by_name(header, kind)


def _outside(headers: Mapping[str, TensorHeader], skeleton: Skeleton | None) -> set[str]:
    """Return the stored names outside the backbone."""
    if skeleton is None:
        return {name for name in headers if is_head_by_name(name)}
    places, outside = skeleton.places, skeleton.outside
    # A tensor that the architecture does not know is inside if it lies beside tensors that are inside.
    roots = {name.split(".")[0] for name, p in places.items() if p.parameter not in outside}
    known = {name for name, place in places.items() if place.parameter in outside}
    return known | {n for n in headers if n not in places and n.split(".")[0] not in roots}


def _tied(headers: Mapping[str, TensorHeader], skeleton: Skeleton) -> dict[str, str]:
    """Return every tied name (the stored one if there is one) with the name that represents its group."""
    stored = {place.parameter: name for name, place in skeleton.places.items()}
    tied: dict[str, str] = {}
    for group in skeleton.tied:
        names = [stored.get(parameter, parameter) for parameter in group]
        canonical = next((name for name in names if name in headers), names[0])
        tied.update({name: canonical for name in names if name != canonical})
    return tied


def _lacking(
    headers: Mapping[str, TensorHeader], skeleton: Skeleton, tied: Mapping[str, str]
) -> str | None:
    """Return the name of the output layer's weight if it is neither stored nor tied to a stored tensor."""
    stored = {place.parameter for name, place in skeleton.places.items() if name in headers}
    head = skeleton.head
    if head is None or head in stored or tied.get(head) in headers:
        return None
    return None if head in tied.values() else head


def _misfits(
    headers: Mapping[str, TensorHeader], tensors: Mapping[str, TensorInfo], skeleton: Skeleton
) -> list[str]:
    """Return notes on stored tensors that the architecture does not have, or not in this shape."""
    notes: list[str] = []
    unknown = [
        n for n in headers if n not in skeleton.places and tensors[n].role is not Role.BUFFER
    ]
    if unknown:
        notes.append(
            f"{some(unknown, 1, quoted=True)}: not in {skeleton.architecture}; their roles come "
            "from name rules"
        )
    reshaped = [
        name
        for name, place in skeleton.places.items()
        if tensors[name].role in _MATRICES
        and not tensors[name].outside_backbone
        and place.expected not in (None, headers[name].shape)
    ]
    if reshaped:
        first = reshaped[0]
        notes.append(
            f"{some(reshaped, 1, quoted=True)}: stored {list(headers[first].shape)}, while "
            f"config.json means {list(skeleton.places[first].expected or ())}"
        )
    return notes
