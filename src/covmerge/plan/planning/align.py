"""Matching the base's tensors with every expert's, and naming the tensors that do not fit.

Nothing is decided silently here. A tensor that is missing, extra, of another shape or of another
kind of dtype either falls under a rule of the recipe or raises an error that names it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath

import torch

from covmerge.base.errors import InputError, TensorError
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, of_all_layers, some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.conversions import converted
from covmerge.files.checkpoints.open import PASS_FOLDED
from covmerge.files.checkpoints.part import part_key
from covmerge.files.checkpoints.unwrapped import in_memory
from covmerge.files.checkpoints.view import respelled, weight_norms
from covmerge.files.quantised.view import dequantised, is_quantised
from covmerge.files.tensors.describe import ModelDescription, conv1d_names, describe_checkpoint
from covmerge.files.tensors.names import find_name, kind_by_name, layer_name
from covmerge.plan.planning.made_on import parts_with
from covmerge.plan.planning.operations import Operand
from covmerge.plan.planning.reached import check_reached
from covmerge.plan.recipe import TensorRules
from covmerge.plan.vocabulary.rows import rows_of

# Mixtures of experts that one source has packed, as in transformers' memory.

_PACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_COMPUTED = re.compile(r"\.parametrizations\.\w+\.original$")
_APART = re.compile(r"\.experts\.\d+\.")


def _check_packing(base: Model, expert_name: str, expert: Model) -> None:
    """Raise if one side has a packed mixture and the other side has its experts as separate tensors.

    Names and the order of rows differ between kinds of models; the base's config tells the kind
    (`files/checkpoints/conversions.py`). transformers saves a model packed if it was loaded packed,
    but not a model that it has built.
    """
    of_base = (f"the base ({base.checkpoint.source})", base.headers)
    of_expert = (f"expert '{expert_name}' ({expert.checkpoint.source})", expert.headers)
    for (called, names), (other, beside) in ((of_base, of_expert), (of_expert, of_base)):
        # Only tensors that one side alone has show the difference.
        packed = next((n for n in names if _PACKED.search(n) and n not in beside), None)
        apart = next((n for n in beside if _APART.search(n) and n not in names), None)
        if packed is not None and apart is not None:
            raise TensorError(
                f"{called} has all experts of a layer in one tensor ('{packed}'), as transformers has "
                f"them in memory, and {other} each by itself ('{apart}'). How they are packed, tells the "
                "base's config.json: pass the base's folder. Or pass the packed one as transformers saves "
                "a new model, `new = type(model)(model.config).to(model.dtype); "
                "new.load_state_dict(model.state_dict()); new.save_pretrained(FOLDER)`"
            )


# (tensor name, role) -> `use` of the first matching rule of the recipe, or None.
ChosenUse = Callable[[str, Role], str | None]
_ANOTHER_BASE = (
    "it is no adapter of this base. Name the base that it was trained on, or leave it out"
)
_ADD_BIASES = (
    "Give the base biases of zeros, if its kind of model may have them: save it again with transformers "
    "after the switch in its config is on (attention_bias of Llama). Otherwise train the adapter without"
)
_IGNORED = "extra tensor (tensors.extra: ignore)"


@dataclass(frozen=True)
class Model:
    """A checkpoint with the description of its tensors."""

    checkpoint: Checkpoint
    description: ModelDescription

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        """Return a checkpoint with the description of its tensors."""
        return cls(checkpoint, describe_checkpoint(checkpoint))

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Stored tensors by name."""
        return self.checkpoint.headers

    @property
    def prefixes(self) -> list[str]:
        """Prefixes that names may have or lack."""
        return [self.description.prefix] if self.description.prefix else []

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor, or of the stored factors of its update."""
        return (self.checkpoint.low_rank.get(name) or self.headers[name]).dtype

    def operand(self, source: str, name: str | None, weight: float = 1.0) -> Operand:
        """Return one of the model's tensors as an operand; an adapter's factors are read whole."""
        stored = None if name is None or name in self.checkpoint.low_rank else self.headers[name]
        rows = stored.shape[0] if stored is not None and stored.shape else None
        return Operand(source, name, rows, weight)

    def stored_bytes(self, name: str, elements: int) -> int:
        """Return the bytes read for `elements` elements of a tensor; factors are read whole."""
        if name in self.checkpoint.low_rank:
            elements = self.checkpoint.low_rank[name].elements
        else:
            elements = self.checkpoint.held(name, elements)
        return elements * self.dtype(name).itemsize


@dataclass(frozen=True)
class Alignment:
    """The match of one expert's tensors with the base's.

    Attributes:
        names: base name -> name in the expert, for tensors that take part in merging.
        missing: base names that the expert lacks.
        resized: base names whose vocabulary has another number of rows in the expert -> that number.
        heads: names in the expert of its own task head.
        head_bases: base names of task heads; the expert's tensor may have another shape.
        ignored: names in the expert that a rule leaves out, with the reason.
        tied: for tensors that the expert stores twice, the name of one -> the name of the other,
            which is used.
        rebuilt: base names of buffers that the model's code creates again, and that the expert
            lacks or has with another shape or kind of dtype.
    """

    names: Mapping[str, str]
    missing: tuple[str, ...]
    resized: Mapping[str, int]
    heads: tuple[str, ...]
    head_bases: tuple[str, ...]
    ignored: Mapping[str, str]
    tied: Mapping[str, str]
    rebuilt: tuple[str, ...] = ()


def check_same_architecture(base: Model, expert_name: str, expert: Model) -> None:
    """Raise if an expert has another model type, or has quantised weights that cannot be read."""
    for model in (base, expert):
        dequantised(model.checkpoint)
    types = [(m.checkpoint.config or {}).get("model_type") for m in (base, expert)]
    if None not in types and types[0] != types[1]:
        key = part_key(expert.checkpoint.config, base.checkpoint.config)
        raise InputError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) is a '{types[1]}' model, the base "
            f"({base.checkpoint.source}) is a '{types[0]}' model: they cannot be merged. "
            + (
                "Check the paths: every expert must be fine-tuned from the base."
                if key is None
                else f"The base is only a part of such a model ({key}): pass the whole '{types[1]}' model "
                "that it is a part of as the base; experts may be parts of it"
            )
        )


def align(
    base: Model, expert_name: str, expert: Model, rules: TensorRules, chosen: ChosenUse
) -> Alignment:
    """Match one expert's tensors with the base's.

    `chosen(name, role)` is the `use` that a rule of the recipe gives a tensor. A tensor that a rule
    takes from the base, or keeps as a head, need not fit.

    Names may differ by the architecture's base-model prefix (`bert.`, `transformer.`, `model.`), as
    between an encoder and the same encoder with a task head.

    Raises:
        TensorError: a tensor is missing, extra or of another shape, and no rule covers it.
    """
    names: dict[str, str] = {}
    missing: list[str] = []
    resized: dict[str, int] = {}
    head_bases: list[str] = []
    own_heads: list[str] = []
    rebuilt: dict[str, str | None] = {}
    if expert.checkpoint.is_adapter:
        return _align_adapter(base, expert_name, expert, chosen)
    prefixes = [*base.prefixes, *expert.prefixes]
    ties = base.checkpoint.untied or {}
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        use = chosen(name, info.role)
        found = find_name(name, prefixes, expert.headers)
        if use == "head" and found is not None:
            own_heads.append(found)
            head_bases.append(name)
            continue
        if info.rebuilt and use is None and not _fits(header, expert.headers.get(found or "")):
            rebuilt[name] = found
            continue
        integers = info.role is Role.BUFFER and not header.dtype.is_floating_point
        if use == "base" or integers:
            if found is not None:
                names[name] = found
                if use != "base":
                    _check_dtypes(expert_name, header, expert.headers[found])
            continue
        if found is None:
            # The tensor that the expert ties this one to is its weight, even if the base does not
            # tie the two. If the expert has no such layer, or no config, the base's ties decide.
            tied = expert.description.tied.get(name, ties.get(name))
            found = None if tied is None else find_name(tied, prefixes, expert.headers)
        if found is None:
            if expert.checkpoint.gives(name) and not _stored_elsewhere(
                name, base, expert, prefixes
            ):
                missing.append(name)
            continue
        other = expert.headers[found]
        _check_dtypes(expert_name, header, other)
        _check_computed(found, expert_name, expert)
        if other.shape == header.shape:
            names[name] = found
        elif _is_vocabulary(base, name, header, other):
            names[name] = found
            resized[name] = other.shape[0]
        elif info.outside_backbone:
            head_bases.append(name)
            own_heads.append(found)
        else:
            raise TensorError(
                f"'{name}' is {list(header.shape)} in the base and {list(other.shape)} in expert "
                f"'{expert_name}' ({expert.checkpoint.source}, '{found}'): it is not a fine-tune of "
                "this base. "
                + (
                    "Pass the base that it was trained from"  # heads in place of layers: nearly the base
                    if _in_a_layer(name)
                    else f"If the tensor is a task head, add {rules_for(name, use='head')}."
                )
            )
    taken = {*names.values(), *own_heads, *filter(None, rebuilt.values())}
    extra_heads, ignored, refused = _extras(base, expert, taken, rules, chosen)
    if refused or missing:
        _check_packing(base, expert_name, expert)
        _check_folded(expert_name, expert)
        _check_weight_norms(base, expert_name, expert)
        _check_parametrized(expert_name, expert, missing)
    # This comes before errors whose advice would let such tensors pass.
    placed = {**names, **dict(zip(head_bases, own_heads, strict=True))}
    _check_reached(base, expert_name, expert, placed, (*extra_heads, *refused), ignored, missing)
    _check_extras(base, expert_name, expert, refused)
    _check_missing(expert_name, expert, missing, rules)
    _check_resized(expert_name, base, resized, rules)
    heads = tuple([*own_heads, *extra_heads])
    _check_heads(base, expert_name, expert, extra_heads)
    return Alignment(
        names,
        tuple(missing),
        resized,
        heads,
        tuple(head_bases),
        ignored,
        stored_ties(expert),
        tuple(rebuilt),
    )


def _align_adapter(base: Model, expert_name: str, adapter: Model, chosen: ChosenUse) -> Alignment:
    """Match an adapter's updates and replaced tensors with the base's; other tensors are unchanged.

    Raises:
        TensorError: a shape differs from the base's, or the base lacks a tensor that is updated.
    """
    names: dict[str, str] = {}
    own_heads: list[str] = []
    head_bases: list[str] = []
    shapes = {
        **{name: header.shape for name, header in adapter.headers.items()},
        **{name: header.shape for name, header in adapter.checkpoint.low_rank.items()},
    }
    known = names_in_base(base, shapes)
    # Another expert may have untied the base; what this one keeps tied it changes with the other.
    for name, target in (base.checkpoint.untied or {}).items():
        if name not in known and target in known and adapter.checkpoint.keeps_ties(known[target]):
            known[name] = known[target]
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        found = known.get(name)
        if found is None:
            continue
        shape = header.shape
        _check_adapted(expert_name, adapter, header, found, chosen(name, info.role))
        if found in adapter.checkpoint.low_rank:
            shape = (shape[0], prod(shape[1:])) if shape else shape
        if shape == shapes[found] and chosen(name, info.role) != "head":
            names[name] = found
        elif found in adapter.headers and (
            info.outside_backbone or chosen(name, info.role) == "head"
        ):
            own_heads.append(found)
            head_bases.append(name)
        elif shape == shapes[found]:
            raise TensorError(
                f"'{name}' is to be kept as a task head by a rule, and expert '{expert_name}' "
                f"({adapter.checkpoint.source}) has only factors of its update: leave it to the base "
                f"with {rules_for(name)}, or merge it"
            )
        else:
            resized = (
                rows_of(name) == "tokens"
                and found in adapter.headers
                and _is_vocabulary(base, name, header, adapter.headers[found])
            )
            raise TensorError(
                f"'{name}' is {list(header.shape)} in the base, and expert '{expert_name}' "
                f"({adapter.checkpoint.source}) has an update of {list(shapes[found])} for it: "
                + (_resize_first(expert_name, shapes[found][0]) if resized else _ANOTHER_BASE)
            )
    # All experts leave these tensors tied, or the base would have been opened untied.
    tied = (find_name(name, base.prefixes, shapes) for name in base.description.tied)
    taken = {*names.values(), *own_heads, *tied}
    unknown = [name for name in adapter.checkpoint.low_rank if name not in taken]
    if unknown:
        _check_bare(base, expert_name, adapter, unknown)
        _check_parts(base, expert_name, adapter, unknown)
        raise TensorError(
            f"expert '{expert_name}' ({adapter.checkpoint.source}) updates "
            f"{counted(len(unknown), 'tensor')} that the base ({base.checkpoint.source}) lacks: "
            f"{some(unknown, 5, quoted=True)}. Is it an adapter of this base?"
        )
    others = [name for name in adapter.headers if name not in taken]
    if of_modules := [name for name in others if adapter.headers[name].module is not None]:
        raise TensorError(
            f"expert '{expert_name}' ({adapter.checkpoint.source}) has modules of sentence-transformers "
            f"with weights of their own ({some(of_modules, 3, quoted=True)}), and the base "
            f"({base.checkpoint.source}) has not: pass the sentence-transformers folder that it was "
            "trained from as the base"
        )
    placed = {**names, **dict(zip(head_bases, own_heads, strict=True))}
    _check_reached(base, expert_name, adapter, placed, others, {}, ())
    heads = tuple([*own_heads, *others])
    _check_heads(base, expert_name, adapter, heads)
    return Alignment(names, (), {}, heads, tuple(head_bases), {}, {})


def _check_bare(base: Model, expert_name: str, adapter: Model, unknown: Sequence[str]) -> None:
    """Raise if the adapter only has biases that the base lacks, for layers that the base has."""
    weights = {f"{name.removesuffix('bias')}weight" for name in unknown if name.endswith(".bias")}
    if len(weights) == len(unknown) == len(names_in_base(base, weights)):
        raise TensorError(
            f"expert '{expert_name}' ({adapter.checkpoint.source}) has a bias for "
            f"{counted(len(unknown), 'layer')} that the base ({base.checkpoint.source}) has without: "
            f"{some(unknown, 5, quoted=True)}. {_ADD_BIASES}"
        )


def _check_parts(base: Model, expert_name: str, adapter: Model, unknown: Sequence[str]) -> None:
    """Raise if parts of the base have all these tensors, and nothing tells the adapter's part."""
    if found := parts_with(unknown, base.checkpoint, base.description):
        name, _ = base.description.parts[found[0]]
        raise TensorError(
            f"expert '{expert_name}' ({adapter.checkpoint.source}) updates tensors that the base "
            f"({base.checkpoint.source}) has in its part{'s' if len(found) > 1 else ''} "
            f"{some(found, 4, quoted=True)}, such as '{unknown[0]}'. If the adapter was made on such a "
            "part, name its class in adapter_config.json, as PEFT does: "
            f'"auto_mapping": {{"base_model_class": "{name}"}}'
        )


def names_in_base(base: Model, names: Collection[str]) -> dict[str, str]:
    """Return the adapter's names for the base's tensors that it changes, by the base's names."""
    renamed = {to: name for name, to in respelled(names, base.headers).items()}
    pieces = Counter(info.parameter for info in base.description.tensors.values())
    found: dict[str, str] = {}
    for name in base.headers:
        info = base.description.tensors[name]
        adapter_name = find_name(name, base.prefixes, names)
        if adapter_name is None and pieces[info.parameter] == 1:
            # The model's names may differ from its files' names, and PEFT uses the model's.
            adapter_name = find_name(info.parameter, base.prefixes, names)
        adapter_name = renamed.get(name) if adapter_name is None else adapter_name
        if adapter_name is not None:
            found[name] = adapter_name
    return found


def over_base(adapter: AdapterCheckpoint, base: Model) -> AdapterCheckpoint:
    """Return an adapter with the base's names, bound to the base's weights that it computes from."""
    if (rejoined := _rejoined(adapter, base)) is not None:
        return rejoined
    conv1d = conv1d_names(base.description)
    folders = PurePath(base.checkpoint.source).parts[-2:]  # a folder, or a file in one
    named = adapter.named_as(base.headers, conv1d, base.checkpoint.config, folders)
    held = {*named.low_rank, *named.headers}
    names = {adapter_name: name for name, adapter_name in names_in_base(base, held).items()}
    return named.over(base.checkpoint, names, conv1d)


def model_in_memory(base: Checkpoint, adapters: Iterable[AdapterCheckpoint]) -> Checkpoint:
    """Return a base with the tensors that transformers splits on loading, if all adapters fit the parts.

    Without adapters they are split too, because a new adapter is loaded over the parts.
    """
    whole = in_memory(base)
    if whole is base or is_quantised(base):
        return base
    model, fused = (
        Model.of(base),
        base.headers.keys() - whole.headers.keys(),
    )
    held = ({*adapter.low_rank, *adapter.headers} for adapter in adapters)
    return whole if all(fused.isdisjoint(names_in_base(model, names)) for names in held) else base


def _rejoined(adapter: AdapterCheckpoint, base: Model) -> AdapterCheckpoint | None:
    """Return an adapter of split tensors over the base's whole ones; None: it changes no part."""
    whole = in_memory(base.checkpoint)
    if whole is base.checkpoint:
        return None
    view = Model.of(whole)
    divided = whole.headers.keys() - base.headers.keys()
    if divided.isdisjoint(names_in_base(view, {*adapter.low_rank, *adapter.headers})):
        return None
    over = over_base(adapter, view)
    names = names_in_base(view, {*over.low_rank, *over.headers})
    shapes, stored = ({n: h.shape for n, h in model.headers.items()} for model in (view, base))
    made = converted(shapes, stored, base.checkpoint.config).made
    return over.rejoined(
        whole,
        names,
        {n: one for n, one in made.items() if not names.keys().isdisjoint(one.stored())},
    )


def _check_heads(base: Model, expert_name: str, expert: Model, heads: Sequence[str]) -> None:
    """Raise if an output layer would be kept as a head although the model ties it to its embedding."""
    tied = base.description.tied or base.checkpoint.untied or {}
    for name in heads if tied else ():
        header = expert.headers[name]
        info = expert.description.tensors.get(name)
        if (info or kind_by_name(header, expert.headers)).role is Role.OUTPUT:
            raise TensorError(
                f"expert '{expert_name}' ({expert.checkpoint.source}) stores the output layer '{name}', "
                f"and the base ({base.checkpoint.source}) ties its own, under another name, to an "
                f"embedding ({some(tied, 3, quoted=True)}): save the expert again under the base's names"
            )


def _check_adapted(
    expert_name: str, adapter: Model, header: TensorHeader, found: str, use: str | None
) -> None:
    """Raise if the updated weights are no floating-point numbers: nothing can be added to codes."""
    if use == "base":
        return
    if found in adapter.headers:
        _check_dtypes(expert_name, header, adapter.headers[found])
    elif not header.dtype.is_floating_point:
        raise TensorError(
            f"expert '{expert_name}' ({adapter.checkpoint.source}) has an update of '{header.name}', "
            f"which is {header.dtype} in the base: nothing can be added to codes. Give the base in a "
            "floating-point dtype"
        )


def _resize_first(expert_name: str, rows: int) -> str:
    return (
        "its base's vocabulary was resized for the training. Resize the base as well (transformers: "
        f"model.resize_token_embeddings({rows}), then model.save_pretrained(NEW), and the adapter's "
        "tokenizer into NEW), and pass NEW as the base. Where other experts have other sizes, fold it into "
        f"NEW instead (`covmerge merge --base NEW --expert {expert_name}=ADAPTER FOLDED`), and merge "
        f"FOLDED in its place over the base as it is, by token: {Hint('tokenizer', 'union')}"
    )


def _check_reached(
    base: Model,
    expert_name: str,
    expert: Model,
    placed: Mapping[str, str],
    extra_heads: Collection[str],
    ignored: Mapping[str, str],
    missing: Collection[str],
) -> None:
    """Check that the expert's tensors reach the output; its own task head is kept beside it.

    Tensors that a rule of the recipe leaves to the base by name are left out on purpose.
    """
    infos = expert.description.tensors
    lost = [name for name, why in ignored.items() if why == _IGNORED]
    lost += [name for name in extra_heads if not infos[name].outside_backbone]
    sizes = {name: header.elements for name, header in expert.checkpoint.low_rank.items()}
    sizes |= {name: prod(header.shape) for name, header in expert.headers.items()}
    check_reached(
        base.checkpoint,
        base.description,
        expert_name,
        expert.checkpoint,
        sizes=sizes,
        placed=placed,
        lost=lost,
        missing=missing,
    )


def stored_ties(model: Model) -> dict[str, str]:
    """Return names of stored tensors that the config ties to another stored one, which is used for both."""
    return {
        name: info.tied_to
        for name, info in model.description.tensors.items()
        if info.tied_to is not None and info.tied_to in model.headers
    }


def _fits(header: TensorHeader, other: TensorHeader | None) -> bool:
    """Return whether an expert's tensor can be merged or compared with the base's unchanged."""
    return (
        other is not None
        and header.shape == other.shape
        and header.dtype.is_floating_point == other.dtype.is_floating_point
    )


def _stored_elsewhere(name: str, base: Model, expert: Model, prefixes: list[str]) -> bool:
    """Return whether the base ties this tensor to one that the expert stores."""
    tied = base.description.tensors[name].tied_to
    return tied is not None and find_name(tied, prefixes, expert.headers) is not None


def _is_vocabulary(base: Model, name: str, header: TensorHeader, other: TensorHeader) -> bool:
    role = base.description.tensors[name].role
    return (
        role in (Role.EMBEDDING, Role.OUTPUT)
        and len(header.shape) == len(other.shape) == 2
        and header.shape[1] == other.shape[1]
    )


def _check_dtypes(expert_name: str, header: TensorHeader, other: TensorHeader) -> None:
    floating = header.dtype.is_floating_point != other.dtype.is_floating_point
    if floating or header.complex != other.complex:
        raise TensorError(
            f"'{header.name}' is {header.as_stored.dtype} in the base and {other.as_stored.dtype} in "
            f"expert '{expert_name}': numbers of different kinds cannot be merged. "
            + (
                "Pass the quantised one as it was before"  # without its layers: nearly the base
                if floating and _in_a_layer(header.name) and len(header.shape) > 1
                else "If one of them is quantised, pass it as it was before; else leave the tensor to the "
                f"base with {rules_for(of_all_layers(header.name))}"
            )
        )


def _in_a_layer(name: str) -> bool:
    return layer_name(name) is not None


def _extras(
    base: Model, expert: Model, taken: set[str], rules: TensorRules, chosen: ChosenUse
) -> tuple[list[str], dict[str, str], list[str]]:
    """Sort tensors that the base lacks into heads, ignored ones with a reason, and refused ones."""
    heads: list[str] = []
    ignored: dict[str, str] = {}
    refused: list[str] = []
    prefixes = [*base.prefixes, *expert.prefixes]
    # All experts leave these tensors tied, or the base would have been opened untied.
    tied = {find_name(n, prefixes, expert.headers): to for n, to in base.description.tied.items()}
    for name in expert.headers:
        if name in taken:
            continue
        info = expert.description.tensors[name]
        use = chosen(name, info.role)
        if use == "head":
            heads.append(name)
        elif use == "base":
            ignored[name] = "extra tensor (rule: base)"
        elif info.tied_to is not None and info.tied_to in taken:
            ignored[name] = f"tied to {info.tied_to}"
        elif name in tied:
            ignored[name] = f"tied to {tied[name]}"
        elif info.role is Role.BUFFER:
            ignored[name] = "buffer that the base does not store"
        elif info.outside_backbone:
            heads.append(name)
        elif rules.extra == "ignore":
            ignored[name] = _IGNORED
        else:
            refused.append(name)
    return heads, ignored, refused


def _check_extras(base: Model, expert_name: str, expert: Model, refused: list[str]) -> None:
    if refused:
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) has "
            f"{counted(len(refused), 'tensor')} that the base ({base.checkpoint.source}) lacks: "
            f"{some(refused, 5, quoted=True)}. Is it a fine-tune of this base? "
            f"If these tensors may be left out, set {Hint('tensors', {'extra': 'ignore'})}; if they are a "
            f"task head, add {rules_for('NAME', use='head')}."
        )


def _check_folded(expert_name: str, expert: Model) -> None:
    """Raise if it is the state dict of a model wrapped by PEFT, because its factors would be left out."""
    factor = next((name for name in expert.headers if ".lora_A." in name), None)
    if factor is not None:
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) holds an adapter beside its weights "
            f"('{factor}'): {PASS_FOLDED}"
        )


def _check_weight_norms(base: Model, expert_name: str, expert: Model) -> None:
    """Raise if an expert has plain weights for the base's weight norms, as these are not determined."""
    plain = expert.headers.keys() - base.headers.keys()
    name = next((name for name in weight_norms(base.headers) if name in plain), None)
    if name is not None:
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) has '{name}', of which the base "
            f"({base.checkpoint.source}) has lengths and directions, a weight norm: pass the base with "
            "plain weights, as torch.nn.utils' remove_parametrizations or remove_weight_norm leaves them"
        )


def _check_parametrized(expert_name: str, expert: Model, missing: Sequence[str]) -> None:
    """Raise if the expert's code computes a missing weight from other tensors; the base's would be used."""
    for name in missing:
        module, _, leaf = name.rpartition(".")
        stems = (f"{module}.parametrizations.{leaf}.", f"{name}_orig")  # also of torch's pruning
        found = next((stored for stored in expert.headers if stored.startswith(stems)), None)
        if found is not None:
            raise TensorError(
                f"expert '{expert_name}' ({expert.checkpoint.source}) has no '{name}', which its code "
                f"computes of '{found}' and others: pass the expert with plain weights, as "
                "remove_parametrizations, remove_spectral_norm or prune.remove of torch.nn.utils leave them"
            )


def _check_computed(name: str, expert_name: str, expert: Model) -> None:
    """Raise if code computes a weight of this tensor, because a mean of such tensors is another weight."""
    spectral = name.endswith("_orig") and f"{name.removesuffix('_orig')}_u" in expert.headers
    if spectral or _COMPUTED.search(name):
        raise TensorError(
            f"the base and expert '{expert_name}' ({expert.checkpoint.source}) have '{name}', of which "
            "their code computes a weight, by its norm for example: pass all models with plain weights, "
            "as remove_parametrizations or remove_spectral_norm of torch.nn.utils leave them"
        )


def _check_missing(expert_name: str, expert: Model, missing: list[str], rules: TensorRules) -> None:
    if missing and rules.missing == "error":
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) lacks {len(missing)} of the "
            f"base's tensors: {some(missing, 5, quoted=True)}. Is it a fine-tune of this base? "
            f"If so choose what their absence means: {Hint('tensors', {'missing': 'base'})} (unchanged "
            f"there) or {Hint('tensors', {'missing': 'present'})} (merged over the experts that have them)."
        )


def _check_resized(
    expert_name: str, base: Model, resized: Mapping[str, int], rules: TensorRules
) -> None:
    if resized and rules.vocabulary == "error":
        name, rows = next(iter(resized.items()))
        if (kind := rows_of(name)) != "tokens":
            raise TensorError(
                f"'{name}' has {base.headers[name].shape[0]} rows in the base and {rows} in expert "
                f"'{expert_name}', and they stand for {kind}. Where the first rows mean the same, as "
                f"places in a text do, set {Hint('tensors', {'vocabulary': 'base'})} to merge the rows of "
                "the base. Places in a picture do not: pass the base that it was trained from, or leave "
                f"the table to the base with {rules_for(name)}"
            )
        raise TensorError(
            f"'{name}' has {base.headers[name].shape[0]} rows in the base and {rows} in expert "
            f"'{expert_name}': the vocabularies differ in size. Merge them by token with "
            f"{Hint('tokenizer', 'union')}; or, if the first rows mean the same tokens, set "
            f"{Hint('tensors', {'vocabulary': 'base'})} to merge the rows of the base."
        )
