"""`adapter_config.json` of PEFT: the fields that decide weights, and the fields that are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, cast

from covmerge.base.errors import CheckpointError
from covmerge.files.adapters.patterns import Patterns
from covmerge.files.adapters.types import (
    FORMER,
    LORA_FIELDS,
    LORA_INITS,
    NOT_READ,
    TYPES,
    WITHOUT_WEIGHTS,
    AdapterType,
)
from covmerge.files.checkpoints.json_file import as_object, shorten

MERGE_FIRST = (
    "merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge full "
    "models"
)
# PEFT changes the base again when it loads such an adapter, and not always as in training.
_SAVE_AGAIN = (
    "only the trained model in memory has both. Save it again from there: merged "
    "(model.merge_and_unload()), or as plain LoRA (save_pretrained with "
    "path_initial_model_for_weight_conversion)"
)
# PEFT's own merge adds the updates of all copies of a layer to the one tensor that the copies share.
_STACK_FIRST = (
    "stack the layers of its base first (a recipe with `slices` and the method passthrough), set "
    "layer_replication to null in adapter_config.json, and merge the adapter over the stacked base"
)

_ALORA = "and acts after these tokens alone: train LoRA instead. Such an adapter is no weight"
_CHANGES = "and it changes what the factors mean, or is not known here"
_ADALORA = "ADALORA"
_ALL_LINEAR = "all-linear"
_MAX_NUMBER = 1e30
_FROM_END = " from its end"  # a field of patterns, searched in reverse order
_EPSILON = 1e-5  # AdaLoRA divides by the rank plus this

# Inits that leave the base unchanged. With any other, the stored factors belong to a changed base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", *LORA_INITS)
# The orders in which Unsloth packs the factors B of a stack of experts, and the fields that name one.
_RANK_MAJOR = "rank_major"  # PEFT's order: term after term, each for all experts
_PACKED_BY_EXPERT = ("grouped_by_expert", "expert_major")
_LAYOUT, _LAYOUTS = "lora_B_layout", "unsloth_fused_expert_lora"
# Models whose experts Unsloth packed by expert before 2026.9.6, without writing the order down.
_ONCE_BY_EXPERT = frozenset(
    {
        *("deepseek_v3", "ernie4_5_moe", "ernie4_5_vl_moe", "gemma4", "glm4_moe", "glm4_moe_lite"),
        *(
            "gpt_oss",
            "lfm2_moe",
            "mixtral",
            "qwen3_5_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_vl_moe",
        ),
    }
)
_READ_OF_ALL = {  # by every type
    "exclude_modules",
    "fan_in_fan_out",
    _LAYOUT,
    _LAYOUTS,
    "layers_pattern",
    "layers_to_transform",
    "peft_type",
    "target_modules",
}
_READ = _READ_OF_ALL | {  # by LoRA
    *LORA_FIELDS,
    "alpha_pattern",
    "ensure_weight_tying",
    "init_lora_weights",
    "init_r",
    "lora_alpha",
    "r",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
}
_WITHOUT_EFFECT = {  # on the weights that are stored
    "auto_mapping",
    "base_model_name_or_path",
    "beta1",
    "beta2",
    "bias",
    "corda_config",
    "deltaT",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "monteclora_config",
    "orth_reg_weight",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_r",
    "task_type",
    "tfinal",
    "tinit",
    "total_step",
    "velora_config",
}
_KNOWN_OFF = {
    "alora_invocation_tokens",
    "arrow_config",
    "enable_lora",  # of PEFT's first versions, like merge_weights
    "layer_replication",
    "megatron_config",
    "merge_weights",
    "use_qalora",
}
_OFF: tuple[object, ...] = (None, False, [], {}, "")


@dataclass(frozen=True)
class AdapterConfig:
    """The configuration of one adapter, checked.

    Attributes:
        where: the adapter, for errors.
        fields: the fields as written in the file.
        architecture: the architecture by whose names llama.cpp calls the tensors; None: other names.
        keeps_ties: whether tensors tied to a changed tensor stay tied to it, as in mlx-lm.
    """

    where: str
    fields: Mapping[str, Any]
    keeps_ties: bool = False
    architecture: str | None = None

    def __post_init__(self) -> None:
        kind: object = self.fields.get("peft_type")
        if kind not in ("LORA", _ADALORA, *TYPES, *FORMER):
            self._refuse_kind(kind)
        for name, value in self.fields.items():
            if name not in self._known and value not in _OFF:
                step = _ALORA if name == "alora_invocation_tokens" else _CHANGES
                self.refuse(name, step)
        if self.fields.get("init_lora_weights") not in _PLAIN_INITS:
            why = "and its factors belong to a base that it changed by what no file has"
            self.refuse("init_lora_weights", why, _SAVE_AGAIN)
        if self.kind is not None and self.kind.refused is not None:
            name, value, why = self.kind.refused
            if self.fields.get(name) == value:
                self.refuse(name, why)
        for name in ("use_dora", "use_rslora", "fan_in_fan_out", "ensure_weight_tying"):
            if self.fields.get(name) not in (None, True, False):
                self.refuse(name, "which is true or false")

    @property
    def notes(self) -> Iterator[str]:
        """Notes for the user about this configuration; some arise only when layers are asked about."""
        if unknown := sorted(set(self.fields) - self._known - _KNOWN_OFF):
            yield f"{self.where}: fields of a later PEFT, all off: {', '.join(unknown)}"
        kind = self.kind
        if kind is not None and kind.older is not None and kind.older[0] not in self.fields:
            field, otherwise = kind.older
            yield (
                f"{self.where} has no {field}: a PEFT saved it that {otherwise}. It was read as that PEFT "
                "computed it"
            )
        stated = any(self.fields.get(name) is not None for name in (_LAYOUT, _LAYOUTS))
        if self._is_of_old_unsloth and not stated:
            yield (
                f"{self.where} is of Unsloth and does not say how its experts' factors lie. They were "
                f'taken as {_PACKED_BY_EXPERT[0]}, as Unsloth had them before 2026.9.6. "{_LAYOUT}": '
                f'"{_RANK_MAJOR}" in adapter_config.json takes them as PEFT\'s'
            )
        for name, of_modules in self._ordered.items():
            module, (first, last, taken) = next(iter(of_modules.items()))
            others = len(of_modules) - 1
            why = "the rank that is stored" if name == "rank_pattern" else "what PEFT reads too"
            yield (
                f"{self.where}: several keys of {name} match '{module}'"
                + (f" and {others} more" if others else "")
                + f", and their order decides: the first gives {first:g}, the last {last:g}. {taken:g} was "
                f"taken, {why}. PEFT sorts the keys when it saves, so that training may have had another "
                "order"
            )

    @property
    def kind(self) -> AdapterType | None:
        """The adapter's type, or None for LoRA and AdaLoRA."""
        name: str = self.fields["peft_type"]
        return TYPES.get(name) or FORMER.get(name)

    @property
    def base_model(self) -> str | None:
        """Path or Hub id of the base that the adapter was trained on, as written at training."""
        name: object = self.fields.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def is_adalora(self) -> bool:
        """Whether it is AdaLoRA: it has factors B, E and A, and its scale does not follow the rank."""
        return self.fields["peft_type"] == _ADALORA

    @property
    def transposed(self) -> bool:
        """Whether the layers of the base are stored as `(d_in, d_out)`."""
        return bool(self.fields.get("fan_in_fan_out"))

    @property
    def tied(self) -> bool:
        """Whether tensors tied to an embedding get its factors too, whatever `target_modules` says."""
        return bool(self.fields.get("ensure_weight_tying"))

    def packs_by_expert(self, parameter: str) -> bool:
        """Return whether B's columns in a stack lie expert after expert; PEFT's lie term after term.

        Raises:
            CheckpointError: the configuration names a layout that is neither of the two.
        """
        found = next((layout for layout in self._layouts(parameter) if layout is not None), None)
        if found is None:
            return self._is_of_old_unsloth
        if found not in (_RANK_MAJOR, *_PACKED_BY_EXPERT):
            self.refuse(_LAYOUT, f"and {_RANK_MAJOR} and {_PACKED_BY_EXPERT[0]} are read")
        return found in _PACKED_BY_EXPERT

    def _layouts(self, parameter: str) -> Iterator[object]:
        """Yield the layouts that the configuration names for a parameter, beside and in `auto_mapping`."""
        for source in (self.fields, as_object(self.fields.get("auto_mapping"))):
            parameters = as_object(as_object(source.get(_LAYOUTS)).get("parameters"))
            yield as_object(parameters.get(parameter)).get(_LAYOUT)
            yield source.get(_LAYOUT)

    @property
    def _is_of_old_unsloth(self) -> bool:
        """Whether an old Unsloth wrote the file, which packed by expert and did not say so."""
        mapping = as_object(self.fields.get("auto_mapping"))
        parts = str(mapping.get("parent_library")).split(".")
        library = [part.removeprefix("unsloth_compiled_module_") for part in parts]
        stacked = bool(self.fields.get("target_parameters"))
        return (
            stacked
            and bool(mapping.get("unsloth_fixed"))
            and not _ONCE_BY_EXPERT.isdisjoint(library)
        )

    def expect(self, modules: Iterable[str]) -> None:
        """Match the patterns against many modules and their parameters at once, because this is faster."""
        ends = {end for found in self._parameters.values() for end in found}
        owners = list(modules)
        self._matcher.ask([*owners, *(f"{owner}.{end}" for owner in owners for end in ends)])

    def scale(self, module: str, rank: int) -> float:
        """Return the number that multiplies the product of the factors of `module`.

        Raises:
            CheckpointError: the configuration and the stored factors disagree about the rank.
        """
        if self.is_adalora:
            alpha = self._number("lora_alpha", self.fields.get("lora_alpha", 8))
            if alpha <= 0:
                self.refuse("lora_alpha", "and AdaLoRA has it positive")
            return alpha
        configured, last = self._readings("r", "rank_pattern", module)
        if rank not in (configured, last):
            raise CheckpointError(
                f"{self.where} stores rank {rank} for '{module}', and its configuration says "
                f"{configured}: correct r or rank_pattern in adapter_config.json, or save the adapter again"
                " (of PEFT's add_weighted_adapter, whose scale is 1: alpha_pattern with the same ranks too)"
            )
        if configured != last:
            self._ordered.setdefault("rank_pattern", {})[module] = (configured, last, rank)
        field = (self.kind and self.kind.alpha) or "lora_alpha"
        alpha, last = self._readings(field, "alpha_pattern", module)
        if alpha != last:
            self._ordered.setdefault("alpha_pattern", {})[module] = (alpha, last, alpha)
        return alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    def ends_in(self, name: str, module: str) -> bool:
        """Return whether a module matches a field that has a pattern or a list of ends of names."""
        value: object = self.fields.get(name)
        if isinstance(value, str):
            return self._matches(name, module)
        return any(module.endswith(end) for end in self._texts(name))

    def rank(self, module: str) -> int:
        """Return the configured rank of a layer, or of a parameter given by its full name."""
        return int(self._readings("r", "rank_pattern", module)[0])

    @property
    def rank_divisor(self) -> float:
        """The number that AdaLoRA divides by if the file has none: the initial rank plus 1e-5."""
        return self._rank("init_r", self.fields.get("init_r", 12)) + _EPSILON

    def parameters(self, module: str) -> tuple[str, ...]:
        """Return the parameters of `module` that `target_parameters` names.

        An empty result means that the module is a layer and its weight has the factors.
        """
        if not self._parameters or self._matches("target_modules", module):
            return ()
        found = (self._parameters.get(owner, ()) for owner in ("", *_ends(module)))
        return tuple(sorted({name for names in found for name in names}))

    def check_target(self, module: str) -> None:
        """Check that PEFT would use the factors of `module`.

        Raises:
            CheckpointError: PEFT would ignore them without a message.
        """
        if self._matches("exclude_modules", module):
            self._refuse_target(module, "exclude_modules")
        targets: object = self.fields.get("target_modules")
        if targets is None or (isinstance(targets, str) and targets.lower() == _ALL_LINEAR):
            return
        if not self._matches("target_modules", module):
            self._refuse_target(module, "target_modules")
        if isinstance(targets, list) and module not in targets and not self._in_layers(module):
            self._refuse_target(module, "layers_to_transform")

    def refuse(self, name: str, why: str, step: str = MERGE_FIRST) -> NoReturn:
        """Raise an error that names one field, its value, the reason and the next step."""
        value = shorten(self.fields.get(name))
        step = _STACK_FIRST if name == "layer_replication" else step
        raise CheckpointError(f"{self.where} has {name} = {value}, {why}: {step}")

    def _refuse_kind(self, kind: object) -> NoReturn:
        if isinstance(kind, str) and kind in WITHOUT_WEIGHTS:
            raise CheckpointError(
                f"{self.where} is a {kind} adapter, which does not come down to weights of its "
                f"base ({WITHOUT_WEIGHTS[kind]}): it cannot be merged, train LoRA instead"
            )
        why = NOT_READ.get(kind, "") if isinstance(kind, str) else ""
        raise CheckpointError(
            f"{self.where} is an adapter of peft_type {shorten(kind)}"
            + (f" ({why})" if why else "")
            + f", and LORA, ADALORA, {', '.join(TYPES)} are read: {MERGE_FIRST}"
        )

    @property
    def _known(self) -> set[str]:
        """The fields that are read, and the fields that do not affect what is stored."""
        kind = self.kind
        return _WITHOUT_EFFECT | (_READ_OF_ALL | {"init_weights", *kind.fields} if kind else _READ)

    def _refuse_target(self, module: str, name: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where} stores factors for '{module}', which {name} = "
            f"{shorten(self.fields.get(name))} does not cover, so that PEFT would not use them: "
            "the files are of different versions, fetch them again"
        )

    def _readings(self, name: str, pattern_name: str, module: str) -> tuple[float, float]:
        """Return a module's number by the first pattern that matches it, and by the last."""
        number = self._rank if name == "r" else self._number
        first = self._matcher.first(pattern_name, module)
        if first is None:
            value = number(name, self.fields.get(name, 8))
            return value, value
        values = list(self._patterns(pattern_name).values())
        last = self._matcher.first(f"{pattern_name}{_FROM_END}", module)
        given = values[first[0]], values[first[0] if last is None else -1 - last[0]]
        return number(pattern_name, given[0]), number(pattern_name, given[1])

    @cached_property
    def _ordered(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """By field and module: the first matching key's number, the last one's, and the one taken."""
        return {}

    @cached_property
    def _listed(self) -> dict[str, frozenset[str]]:
        return {}

    @cached_property
    def _parameters(self) -> Mapping[str, set[str]]:
        """Names of parameters by the end of their module's name, which may be empty."""
        found: dict[str, set[str]] = {}
        for name in self._texts("target_parameters"):
            owner, _, end = name.rpartition(".")
            found.setdefault(owner, set()).add(end)
        return found

    @cached_property
    def _matcher(self) -> Patterns:
        """The patterns, combined as PEFT combines them."""
        of_numbers = {
            name: ([rf"(.*\.)?({pattern})$" for pattern in self._patterns(name)], False)
            for name in ("rank_pattern", "alpha_pattern")
        }
        of_numbers |= {
            f"{name}{_FROM_END}": (patterns[::-1] if len(patterns) > 1 else [], whole)
            for name, (patterns, whole) in of_numbers.items()
        }
        of_modules = {
            name: ([value], True)
            for name in ("target_modules", "exclude_modules", "feedforward_modules")
            if isinstance(value := self.fields.get(name), str) and value.lower() != _ALL_LINEAR
        }
        of_layers = [
            rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."
            for pattern in self._texts("layers_pattern")
            if self._layers
        ]
        fields = {**of_numbers, **of_modules, "layers_pattern": (of_layers, False)}
        return Patterns(self.where, fields)

    def _patterns(self, name: str) -> dict[str, object]:
        value: object = self.fields.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(name, "which is an object of patterns and numbers")
        return cast("dict[str, object]", value)

    def _matches(self, name: str, module: str) -> bool:
        value: object = self.fields.get(name)
        if value is None:
            return False
        if isinstance(value, str):
            return bool(value) and self._matcher.first(name, module) is not None
        return not self._modules(name).isdisjoint(_ends(module))

    def _modules(self, name: str) -> frozenset[str]:
        """Return the ends of names in a field that lists modules."""
        if name not in self._listed:
            self._listed[name] = frozenset(self._texts(name))
        return self._listed[name]

    def _in_layers(self, module: str) -> bool:
        if not self._layers:
            return True
        if self._texts("layers_pattern"):
            found = self._matcher.first("layers_pattern", module)
            index = None if found is None else found[1]
        else:
            match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
            index = None if match is None else match[1]
        return index is not None and int(index) in self._layers

    @property
    def _layers(self) -> list[object]:
        """Numbers of the layers that are adapted; an empty list means all."""
        layers: object = self.fields.get("layers_to_transform")
        if isinstance(layers, list):
            return cast("list[object]", layers)
        return [] if layers is None else [layers]

    def _texts(self, name: str) -> list[str]:
        value: object = self.fields.get(name)
        items = cast("list[object]", value if isinstance(value, list) else [value] if value else [])
        if not all(isinstance(item, str) for item in items):
            self.refuse(name, "which is a list of strings")
        return cast("list[str]", items)

    def _rank(self, name: str, value: object) -> int:
        if type(value) is not int or value < 1:
            self.refuse(name, "which is a positive whole number")
        return value

    def _number(self, name: str, value: object) -> float:
        number = value if isinstance(value, int | float) else math.nan
        if isinstance(value, bool) or not abs(number) < _MAX_NUMBER:
            self.refuse(name, "which is a finite number")
        return number


def _ends(module: str) -> list[str]:
    """Return a module's name, and each part of it that begins after a dot.

    Example:
        >>> _ends("layers.0.mlp")
        ['layers.0.mlp', '0.mlp', 'mlp']
    """
    parts = module.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]
