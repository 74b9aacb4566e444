"""Find the base's tensors in every expert, and name what does not fit.

Nothing here is decided silently: a tensor that is missing, extra, of another shape or of another
kind of dtype either falls under a rule of the recipe or is a named error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from covmerge.checkpoints import Checkpoint
from covmerge.errors import InputError, TensorError
from covmerge.recipe import TensorRules
from covmerge.tensors import ModelDescription
from covmerge.types import Role, TensorHeader

# (tensor name, role) -> `use` of the first rule of the recipe that matches, if it has one.
ChosenUse = Callable[[str, Role], str | None]


@dataclass(frozen=True)
class Model:
    """A checkpoint and what its tensors are."""

    checkpoint: Checkpoint
    description: ModelDescription

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Stored tensors by name."""
        return self.checkpoint.headers


@dataclass(frozen=True)
class Alignment:
    """One expert against the base.

    Attributes:
        names: base name -> name in the expert, for tensors that take part in merging.
        missing: base names the expert lacks.
        resized: base names whose vocabulary rows differ: base name -> rows in the expert.
        heads: names in the expert that are its own task head.
        head_bases: base names whose shape is another one in the expert because it is a task head.
        ignored: names in the expert left out by a rule, with the reason.
    """

    names: Mapping[str, str]
    missing: tuple[str, ...]
    resized: Mapping[str, int]
    heads: tuple[str, ...]
    head_bases: tuple[str, ...]
    ignored: Mapping[str, str]


def check_same_architecture(base: Model, expert_name: str, expert: Model) -> None:
    """Refuse an expert of another model type, or one whose weights are stored quantised."""
    for role, model in (("base", base), (f"expert '{expert_name}'", expert)):
        config = model.checkpoint.config or {}
        if config.get("quantization_config"):
            raise InputError(
                f"{role} {model.checkpoint.source} stores quantised weights (quantization_config in "
                "config.json): their numbers mean nothing without their scales. Dequantise it first "
                "(transformers: model.dequantize(), then save_pretrained)."
            )
    types = [(m.checkpoint.config or {}).get("model_type") for m in (base, expert)]
    if None not in types and types[0] != types[1]:
        raise InputError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) is a '{types[1]}' model, the base "
            f"({base.checkpoint.source}) is a '{types[0]}' model: they cannot be merged. "
            "Check the paths: every expert must be fine-tuned from the base."
        )


def align(
    base: Model, expert_name: str, expert: Model, rules: TensorRules, chosen: ChosenUse
) -> Alignment:
    """Match one expert's tensors to the base's.

    `chosen(name, role)` is what a rule of the recipe says of a tensor; a tensor that a rule takes
    from the base, or keeps as a head, need not fit.

    Names may differ by the architecture's base-model prefix (`bert.`, `transformer.`, `model.`), as
    between an encoder and the same encoder under a task head.

    Raises:
        TensorError: a missing or extra tensor, or another shape, that no rule covers.
    """
    names: dict[str, str] = {}
    missing: list[str] = []
    resized: dict[str, int] = {}
    head_bases: list[str] = []
    own_heads: list[str] = []
    prefixes = [p for p in (base.description.prefix, expert.description.prefix) if p]
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        use = chosen(name, info.role)
        found = _find(name, prefixes, expert)
        if use == "head" and found is not None:
            own_heads.append(found)
            head_bases.append(name)
            continue
        if use == "base" or (info.role is Role.BUFFER and not header.dtype.is_floating_point):
            if found is not None:
                names[name] = found
            continue
        if found is None:
            if not _stored_elsewhere(name, base, expert, prefixes):
                missing.append(name)
            continue
        other = expert.headers[found]
        _check_dtypes(expert_name, header, other)
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
                "this base. If the tensor is a task head, add the rule "
                f"{{match: '{name}', use: head}}."
            )
    taken = {*names.values(), *own_heads}
    extra_heads, ignored = _extras(base, expert_name, expert, taken, rules, chosen)
    _check_missing(expert_name, expert, missing, rules)
    _check_resized(expert_name, base, resized, rules)
    heads = tuple([*own_heads, *extra_heads])
    return Alignment(names, tuple(missing), resized, heads, tuple(head_bases), ignored)


def _find(name: str, prefixes: list[str], expert: Model) -> str | None:
    candidates = [name]
    for prefix in prefixes:
        candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return next((c for c in candidates if c in expert.headers), None)


def _stored_elsewhere(name: str, base: Model, expert: Model, prefixes: list[str]) -> bool:
    """Whether the expert ties this tensor to one that it stores, and so need not store it."""
    tied = base.description.tensors[name].tied_to or expert.description.tied.get(name)
    return tied is not None and _find(tied, prefixes, expert) is not None


def _is_vocabulary(base: Model, name: str, header: TensorHeader, other: TensorHeader) -> bool:
    role = base.description.tensors[name].role
    return (
        role in (Role.EMBEDDING, Role.OUTPUT)
        and len(header.shape) == len(other.shape) == 2
        and header.shape[1] == other.shape[1]
    )


def _check_dtypes(expert_name: str, header: TensorHeader, other: TensorHeader) -> None:
    if header.dtype.is_floating_point != other.dtype.is_floating_point:
        raise TensorError(
            f"'{header.name}' is {header.dtype} in the base and {other.dtype} in expert "
            f"'{expert_name}': numbers of different kinds cannot be merged. "
            "Is one of them quantised?"
        )


def _extras(
    base: Model,
    expert_name: str,
    expert: Model,
    taken: set[str],
    rules: TensorRules,
    chosen: ChosenUse,
) -> tuple[list[str], dict[str, str]]:
    heads: list[str] = []
    ignored: dict[str, str] = {}
    refused: list[str] = []
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
        elif info.role is Role.BUFFER:
            ignored[name] = "buffer that the base does not store"
        elif info.outside_backbone:
            heads.append(name)
        elif rules.extra == "ignore":
            ignored[name] = "extra tensor (tensors.extra: ignore)"
        else:
            refused.append(name)
    if refused:
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) has {len(refused)} tensors that "
            f"the base ({base.checkpoint.source}) lacks: {_some(refused)}. Is it a fine-tune of this "
            "base? If these tensors may be left out, set `tensors: {extra: ignore}`; if they are a "
            "task head, add a rule with `use: head`."
        )
    return heads, ignored


def _check_missing(expert_name: str, expert: Model, missing: list[str], rules: TensorRules) -> None:
    if missing and rules.missing == "error":
        raise TensorError(
            f"expert '{expert_name}' ({expert.checkpoint.source}) lacks {len(missing)} of the "
            f"base's tensors: {_some(missing)}. Is it a fine-tune of this base? If so choose what their "
            "absence means: `tensors: {missing: base}` (unchanged there) or "
            "`{missing: present}` (merged over the experts that have them)."
        )


def _check_resized(
    expert_name: str, base: Model, resized: Mapping[str, int], rules: TensorRules
) -> None:
    if resized and rules.vocabulary == "error":
        name, rows = next(iter(resized.items()))
        raise TensorError(
            f"'{name}' has {base.headers[name].shape[0]} rows in the base and {rows} in expert "
            f"'{expert_name}': the vocabularies differ in size. If the first rows mean the same "
            "tokens, set `tensors: {vocabulary: base}` to merge the rows of the base."
        )


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
