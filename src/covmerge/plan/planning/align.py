"""Matching the base's tensors with every expert's, and naming the tensors that do not fit.

Nothing is decided silently here. A tensor that is missing, extra, of another shape or of another
kind of dtype either falls under a rule of the recipe or raises an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from covmerge.base.errors import InputError, TensorError
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, of_all_layers, some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.open import PASS_FOLDED
from covmerge.files.checkpoints.part import part_key
from covmerge.files.checkpoints.view import weight_norms
from covmerge.files.quantised.view import dequantised
from covmerge.files.tensors.names import find_name, kind_by_name, layer_name
from covmerge.plan.planning.models import Model, names_in_base, parts_with
from covmerge.plan.planning.reached import check_reached
from covmerge.plan.recipe import TensorRules
from covmerge.plan.vocabulary.rows import rows_of

# Mixtures of experts that one source has packed, as in transformers' memory.

_PACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_COMPUTED = re.compile(r"\.parametrizations\.\w+\.original$")
_APART = re.compile(r"\.experts\.\d+\.")


def _check_packing(base: Model, expert: Model) -> None:
    """Raise if one side has a packed mixture and the other side has its experts as separate tensors.

    Names and the order of rows differ between kinds of models; the base's config tells the kind
    (`files/checkpoints/conversions.py`). transformers saves a model packed if it was loaded packed,
    but not a model that it has built.
    """
    for one, other in ((base, expert), (expert, base)):
        # Only tensors that one side alone has show the difference.
        alone, beside = one.headers.keys() - other.headers, other.headers.keys() - one.headers
        packed = next((n for n in one.headers if n in alone and _PACKED.search(n)), None)
        apart = next((n for n in other.headers if n in beside and _APART.search(n)), None)
        if packed is not None and apart is not None:
            raise TensorError(
                f"{one} has all experts of a layer in one tensor ('{packed}'), as transformers has "
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
class Alignment:
    """The match of one expert's tensors with the base's."""

    # Base name -> name in the expert, for tensors that take part in merging.
    names: Mapping[str, str]
    missing: tuple[str, ...]  # base names that the expert lacks
    # Base names whose vocabulary has another number of rows in the expert -> that number.
    resized: Mapping[str, int]
    heads: tuple[str, ...]  # names in the expert of its own task head
    # Base names of task heads; the expert's tensor may have another shape.
    head_bases: tuple[str, ...]
    ignored: Mapping[str, str]  # names in the expert that a rule leaves out, with the reason
    # For tensors that the expert stores twice, the name of one -> the name of the other, which is
    # used.
    tied: Mapping[str, str]
    # Base names of buffers that the model's code creates again, and that the expert lacks or has
    # with another shape or kind of dtype.
    rebuilt: tuple[str, ...]


def check_same_architecture(base: Model, expert: Model) -> None:
    """Raise if an expert has another model type, or has quantised weights that cannot be read."""
    for model in (base, expert):
        dequantised(model.checkpoint)
    theirs, own = expert.model_type, base.model_type
    if None not in (theirs, own) and theirs != own:
        key = part_key(expert.checkpoint.config, base.checkpoint.config)
        raise InputError(
            f"{expert} is a '{theirs}' model, {base} is a '{own}' model: they cannot be merged. "
            + (
                "Check the paths: every expert must be fine-tuned from the base."
                if key is None
                else f"The base is only a part of such a model ({key}): pass the whole '{theirs}' model "
                "that it is a part of as the base; experts may be parts of it"
            )
        )


def align(base: Model, expert: Model, rules: TensorRules, chosen: ChosenUse) -> Alignment:
    """Match one expert's tensors with the base's.

    `chosen(name, role)` is the `use` that a rule of the recipe gives a tensor. A tensor that a rule
    takes from the base, or keeps as a head, need not fit.

    Names may differ by the architecture's base-model prefix (`bert.`, `transformer.`, `model.`), as
    between an encoder and the same encoder with a task head.

    Raises:
        TensorError: a tensor is missing, extra or of another shape, and no rule covers it.
    """
    if expert.checkpoint.is_adapter:
        return _align_adapter(base, expert, chosen)
    names: dict[str, str] = {}
    missing: list[str] = []
    resized: dict[str, int] = {}
    heads: dict[str, str] = {}
    rebuilt: dict[str, str | None] = {}
    prefixes = [*base.prefixes, *expert.prefixes]
    ties = base.checkpoint.untied or {}
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        use = chosen(name, info.role)
        found = find_name(name, prefixes, expert.headers)
        if use == "head" and found is not None:
            heads[name] = found
            continue
        if info.rebuilt and use is None and not _fits(header, expert.headers.get(found or "")):
            rebuilt[name] = found
            continue
        integers = info.role is Role.BUFFER and not header.dtype.is_floating_point
        if use == "base" or integers:
            if found is not None:
                names[name] = found
                if use != "base":
                    _check_dtypes(expert, header, expert.headers[found])
            continue
        if found is None:
            # The tensor that the expert ties this one to is its weight, even if the base does not
            # tie the two. If the expert has no such layer, or no config, the base's ties decide.
            tied = expert.description.tied.get(name, ties.get(name))
            found = None if tied is None else find_name(tied, prefixes, expert.headers)
        if found is None:
            # The base may tie it to a tensor that the expert stores.
            stored = (
                None if info.tied_to is None else find_name(info.tied_to, prefixes, expert.headers)
            )
            if expert.checkpoint.gives(name) and stored is None:
                missing.append(name)
            continue
        other = expert.headers[found]
        _check_dtypes(expert, header, other)
        _check_computed(found, expert)
        if other.shape == header.shape:
            names[name] = found
        elif _is_vocabulary(base, name, header, other):
            names[name] = found
            resized[name] = other.shape[0]
        elif info.outside_backbone:
            heads[name] = found
        else:
            raise TensorError(
                f"'{name}' is {list(header.shape)} in the base and {list(other.shape)} in expert "
                f"'{expert.name}' ({expert.checkpoint.source}, '{found}'): it is not a fine-tune of "
                "this base. "
                + (
                    "Pass the base that it was trained from"  # heads in place of layers: nearly the base
                    if layer_name(name) is not None
                    else f"If the tensor is a task head, add {rules_for(name, use='head')}."
                )
            )
    taken = {*names.values(), *heads.values(), *filter(None, rebuilt.values())}
    extra_heads, ignored, refused = _extras(base, expert, taken, rules, chosen)
    if refused or missing:
        _check_packing(base, expert)
        _check_folded(expert)
        _check_weight_norms(base, expert)
        _check_parametrized(expert, missing)
    # This comes before errors whose advice would let such tensors pass. What a rule leaves to the base by
    # name is left out on purpose.
    unplaced = [name for name, why in ignored.items() if why == _IGNORED]
    check_reached(base, expert, names | heads, [*unplaced, *extra_heads, *refused], missing)
    _check_extras(base, expert, refused)
    _check_missing(expert, missing, rules)
    _check_resized(base, expert, resized, rules)
    _check_heads(base, expert, extra_heads)
    return Alignment(
        names,
        tuple(missing),
        resized,
        (*heads.values(), *extra_heads),
        tuple(heads),
        ignored,
        stored_ties(expert),
        tuple(rebuilt),
    )


def _align_adapter(base: Model, adapter: Model, chosen: ChosenUse) -> Alignment:
    """Match an adapter's updates and replaced tensors with the base's; other tensors are unchanged."""
    names: dict[str, str] = {}
    heads: dict[str, str] = {}
    held = {**adapter.headers, **adapter.checkpoint.low_rank}
    shapes = {name: header.shape for name, header in held.items()}
    known = names_in_base(base, shapes)
    # Another expert may have untied the base; what this one keeps tied it changes with the other.
    for name, target in (base.checkpoint.untied or {}).items():
        if name not in known and target in known and adapter.checkpoint.keeps_ties(known[target]):
            known[name] = known[target]
    for name, header in base.headers.items():
        found = known.get(name)
        if found is None:
            continue
        info, shape = base.description.tensors[name], header.shape
        use = chosen(name, info.role)
        _check_adapted(adapter, header, found, use)
        if found in adapter.checkpoint.low_rank:
            shape = (shape[0], prod(shape[1:])) if shape else shape
        if shape == shapes[found] and use != "head":
            names[name] = found
        elif found in adapter.headers and (info.outside_backbone or use == "head"):
            heads[name] = found
        elif shape == shapes[found]:
            raise TensorError(
                f"'{name}' is to be kept as a task head by a rule, and {adapter} has only factors of its "
                f"update: leave it to the base with {rules_for(name)}, or merge it"
            )
        else:
            resized = (
                rows_of(name) == "tokens"
                and found in adapter.headers
                and _is_vocabulary(base, name, header, adapter.headers[found])
            )
            raise TensorError(
                f"'{name}' is {list(header.shape)} in the base, and {adapter} has an update of "
                f"{list(shapes[found])} for it: "
                + (_resize_first(adapter, shapes[found][0]) if resized else _ANOTHER_BASE)
            )
    # All experts leave these tensors tied, or the base would have been opened untied.
    tied = (find_name(name, base.prefixes, shapes) for name in base.description.tied)
    taken = {*names.values(), *heads.values(), *tied}
    unknown = [name for name in adapter.checkpoint.low_rank if name not in taken]
    if unknown:
        _check_bare(base, adapter, unknown)
        _check_parts(base, adapter, unknown)
        raise TensorError(
            f"{adapter} updates {counted(len(unknown), 'tensor')} that {base} lacks: "
            f"{some(unknown, 5, quoted=True)}. Is it an adapter of this base?"
        )
    others = [name for name in adapter.headers if name not in taken]
    if of_modules := [name for name in others if adapter.headers[name].module is not None]:
        raise TensorError(
            f"{adapter} has modules of sentence-transformers with weights of their own "
            f"({some(of_modules, 3, quoted=True)}), and {base} has not: pass the sentence-transformers "
            "folder that it was trained from as the base"
        )
    check_reached(base, adapter, names | heads, others, ())
    own_heads = (*heads.values(), *others)
    _check_heads(base, adapter, own_heads)
    return Alignment(names, (), {}, own_heads, tuple(heads), {}, {}, ())


def _check_bare(base: Model, adapter: Model, unknown: Sequence[str]) -> None:
    weights = {f"{name.removesuffix('bias')}weight" for name in unknown if name.endswith(".bias")}
    if len(weights) == len(unknown) == len(names_in_base(base, weights)):
        raise TensorError(
            f"{adapter} has a bias for {counted(len(unknown), 'layer')} that {base} has without: "
            f"{some(unknown, 5, quoted=True)}. {_ADD_BIASES}"
        )


def _check_parts(base: Model, adapter: Model, unknown: Sequence[str]) -> None:
    if found := parts_with(unknown, base):
        name, _ = base.description.parts[found[0]]
        raise TensorError(
            f"{adapter} updates tensors that {base} has in its part{'s' if len(found) > 1 else ''} "
            f"{some(found, 4, quoted=True)}, such as '{unknown[0]}'. If the adapter was made on such a "
            "part, name its class in adapter_config.json, as PEFT does: "
            f'"auto_mapping": {{"base_model_class": "{name}"}}'
        )


def _check_heads(base: Model, expert: Model, heads: Sequence[str]) -> None:
    """Raise if an output layer would be kept as a head although the model ties it to its embedding."""
    tied = base.description.tied or base.checkpoint.untied or {}
    for name in heads if tied else ():
        header = expert.headers[name]
        info = expert.description.tensors.get(name)
        if (info or kind_by_name(header, expert.headers)).role is Role.OUTPUT:
            raise TensorError(
                f"{expert} stores the output layer '{name}', and {base} ties its own, under another name, "
                f"to an embedding ({some(tied, 3, quoted=True)}): save the expert again under the base's "
                "names"
            )


def _check_adapted(adapter: Model, header: TensorHeader, found: str, use: str | None) -> None:
    if use == "base":
        return
    if found in adapter.headers:
        _check_dtypes(adapter, header, adapter.headers[found])
    elif not header.dtype.is_floating_point:
        raise TensorError(
            f"{adapter} has an update of '{header.name}', which is {header.dtype} in the base: nothing can "
            "be added to codes. Give the base in a floating-point dtype"
        )


def _resize_first(adapter: Model, rows: int) -> str:
    return (
        "its base's vocabulary was resized for the training. Resize the base as well (transformers: "
        f"model.resize_token_embeddings({rows}), then model.save_pretrained(NEW), and the adapter's "
        "tokenizer into NEW), and pass NEW as the base. Where other experts have other sizes, fold it into "
        f"NEW instead (`covmerge merge --base NEW --expert {adapter.name}=ADAPTER FOLDED`), and merge "
        f"FOLDED in its place over the base as it is, by token: {Hint('tokenizer', 'union')}"
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


def _is_vocabulary(base: Model, name: str, header: TensorHeader, other: TensorHeader) -> bool:
    role = base.description.tensors[name].role
    return (
        role in (Role.EMBEDDING, Role.OUTPUT)
        and len(header.shape) == len(other.shape) == 2
        and header.shape[1] == other.shape[1]
    )


def _check_dtypes(expert: Model, header: TensorHeader, other: TensorHeader) -> None:
    floating = header.dtype.is_floating_point != other.dtype.is_floating_point
    if floating or header.complex != other.complex:
        raise TensorError(
            f"'{header.name}' is {header.as_stored.dtype} in the base and {other.as_stored.dtype} in "
            f"expert '{expert.name}': numbers of different kinds cannot be merged. "
            + (
                "Pass the quantised one as it was before"  # without its layers: nearly the base
                if floating and layer_name(header.name) is not None and len(header.shape) > 1
                else "If one of them is quantised, pass it as it was before; else leave the tensor to the "
                f"base with {rules_for(of_all_layers(header.name))}"
            )
        )


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


def _check_extras(base: Model, expert: Model, refused: list[str]) -> None:
    if refused:
        raise TensorError(
            f"{expert} has {counted(len(refused), 'tensor')} that {base} lacks: "
            f"{some(refused, 5, quoted=True)}. Is it a fine-tune of this base? "
            f"If these tensors may be left out, set {Hint('tensors', {'extra': 'ignore'})}; if they are a "
            f"task head, add {rules_for('NAME', use='head')}."
        )


def _check_folded(expert: Model) -> None:
    """Raise if it is the state dict of a model wrapped by PEFT, because its factors would be left out."""
    factor = next((name for name in expert.headers if ".lora_A." in name), None)
    if factor is not None:
        raise TensorError(
            f"{expert} holds an adapter beside its weights ('{factor}'): {PASS_FOLDED}"
        )


def _check_weight_norms(base: Model, expert: Model) -> None:
    """Raise if an expert has plain weights for the base's weight norms, as these are not determined."""
    plain = expert.headers.keys() - base.headers.keys()
    name = next((name for name in weight_norms(base.headers) if name in plain), None)
    if name is not None:
        raise TensorError(
            f"{expert} has '{name}', of which {base} has lengths and directions, a weight norm: pass the "
            "base with plain weights, as torch.nn.utils' remove_parametrizations or remove_weight_norm "
            "leaves them"
        )


def _check_parametrized(expert: Model, missing: Sequence[str]) -> None:
    """Raise if the expert's code computes a missing weight from other tensors; the base's would be used."""
    for name in missing:
        module, _, leaf = name.rpartition(".")
        stems = (f"{module}.parametrizations.{leaf}.", f"{name}_orig")  # of spectral_norm
        found = next((stored for stored in expert.headers if stored.startswith(stems)), None)
        if found is not None:
            raise TensorError(
                f"{expert} has no '{name}', which its code computes of '{found}' and others: pass the "
                "expert with plain weights, as remove_parametrizations or remove_spectral_norm of "
                "torch.nn.utils leave them"
            )


def _check_computed(name: str, expert: Model) -> None:
    """Raise if code computes a weight of this tensor, because a mean of such tensors is another weight."""
    spectral = name.endswith("_orig") and f"{name.removesuffix('_orig')}_u" in expert.headers
    if spectral or _COMPUTED.search(name):
        raise TensorError(
            f"the base and {expert} have '{name}', of which their code computes a weight, by its norm for "
            "example: pass all models with plain weights, as remove_parametrizations or "
            "remove_spectral_norm of torch.nn.utils leave them"
        )


def _check_missing(expert: Model, missing: list[str], rules: TensorRules) -> None:
    if missing and rules.missing == "error":
        raise TensorError(
            f"{expert} lacks {len(missing)} of the base's tensors: {some(missing, 5, quoted=True)}. Is it "
            "a fine-tune of this base? If so choose what their absence means: "
            f"{Hint('tensors', {'missing': 'base'})} (unchanged there) or "
            f"{Hint('tensors', {'missing': 'present'})} (merged over the experts that have them)."
        )


def _check_resized(
    base: Model, expert: Model, resized: Mapping[str, int], rules: TensorRules
) -> None:
    if resized and rules.vocabulary == "error":
        name, rows = next(iter(resized.items()))
        if (kind := rows_of(name)) != "tokens":
            raise TensorError(
                f"'{name}' has {base.headers[name].shape[0]} rows in the base and {rows} in expert "
                f"'{expert.name}', and they stand for {kind}. Where the first rows mean the same, as "
                f"places in a text do, set {Hint('tensors', {'vocabulary': 'base'})} to merge the rows of "
                "the base. Places in a picture do not: pass the base that it was trained from, or leave "
                f"the table to the base with {rules_for(name)}"
            )
        raise TensorError(
            f"'{name}' has {base.headers[name].shape[0]} rows in the base and {rows} in expert "
            f"'{expert.name}': the vocabularies differ in size. Merge them by token with "
            f"{Hint('tokenizer', 'union')}; or, if the first rows mean the same tokens, set "
            f"{Hint('tensors', {'vocabulary': 'base'})} to merge the rows of the base."
        )
