"""`adapter_config.json` as PEFT writes it: what of it decides weights, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from covmerge.checkpoints.json_file import shorten
from covmerge.errors import CheckpointError

MERGE_FIRST = (
    "merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge full "
    "models"
)

_ADALORA = "ADALORA"
_ALL_LINEAR = "all-linear"
_MAX_PATTERN = 1000  # characters
_MAX_NUMBER = 1e30
_EPSILON = 1e-5  # AdaLoRA divides by the rank plus this

_WITHOUT_WEIGHTS = {
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "POLY",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "XLORA",
}
# Inits that leave the base as it was; what PEFT writes for any other refers to a changed base.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_READ = {
    "alpha_pattern",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "init_r",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
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
    "ensure_weight_tying",  # the tied tensor is one tensor here anyhow
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
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
}
_KNOWN_OFF = {
    "alora_invocation_tokens",
    "arrow_config",
    "enable_lora",  # of the first versions, as is merge_weights
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "merge_weights",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
}
_OFF: tuple[object, ...] = (None, False, [], {}, "")


@dataclass(frozen=True)
class AdapterConfig:
    """The configuration of one LoRA or AdaLoRA adapter, checked.

    Attributes:
        where: the adapter, for errors.
        fields: as they are written.
    """

    where: str
    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind: object = self.fields.get("peft_type")
        if kind not in ("LORA", _ADALORA):
            self._refuse_kind(kind)
        for name, value in self.fields.items():
            if name not in _READ | _WITHOUT_EFFECT and value not in _OFF:
                self.refuse(name, "and it changes what the factors mean, or is not known here")
        if self.fields.get("init_lora_weights") not in _PLAIN_INITS:
            self.refuse("init_lora_weights", "and its factors belong to a base that it changed")
        for name in ("use_rslora", "fan_in_fan_out"):
            if self.fields.get(name) not in (None, True, False):
                self.refuse(name, "which is true or false")

    @property
    def notes(self) -> tuple[str, ...]:
        """Fields that are not known here, all of them off."""
        unknown = sorted(set(self.fields) - _READ - _WITHOUT_EFFECT - _KNOWN_OFF)
        if not unknown:
            return ()
        return (f"{self.where}: fields of a later PEFT, all off: {', '.join(unknown)}",)

    @property
    def base_model(self) -> str | None:
        """Path or Hub id of the base, as the training knew it."""
        name: object = self.fields.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def is_adalora(self) -> bool:
        """Whether the factors are B, E and A, and the scale does not follow the rank."""
        return self.fields["peft_type"] == _ADALORA

    @property
    def transposed(self) -> bool:
        """Whether the layers of the base are stored as `(d_in, d_out)`."""
        return bool(self.fields.get("fan_in_fan_out"))

    def scale(self, module: str, rank: int) -> float:
        """Return what the product of the factors of `module` is multiplied by.

        Raises:
            CheckpointError: the configuration gives another rank than is stored.
        """
        if self.is_adalora:
            alpha = self._number("lora_alpha", self.fields.get("lora_alpha", 8))
            if alpha <= 0:
                self.refuse("lora_alpha", "and AdaLoRA has it positive")
            return alpha
        configured = self.rank(module)
        if rank != configured:
            raise CheckpointError(
                f"{self.where} stores rank {rank} for '{module}', and its configuration says "
                f"{configured}: the files are of different versions, fetch them again"
            )
        alpha = self._of_module("lora_alpha", "alpha_pattern", module)
        return alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    def rank(self, module: str) -> int:
        """Return the rank that a layer, or a parameter by its full name, was given."""
        return int(self._of_module("r", "rank_pattern", module))

    @property
    def rank_divisor(self) -> float:
        """What AdaLoRA divides by where the file does not say: the rank it began with."""
        return self._rank("init_r", self.fields.get("init_r", 12)) + _EPSILON

    def parameters(self, module: str) -> tuple[str, ...]:
        """Return the names that `target_parameters` gives to what `module` has factors for.

        None of them: it is a layer, with a weight.
        """
        names = self._texts("target_parameters")
        if not names or self._matches("target_modules", module):
            return ()
        found = {
            end
            for owner, _, end in (name.rpartition(".") for name in names)
            if not owner or module == owner or module.endswith(f".{owner}")
        }
        return tuple(sorted(found))

    def check_target(self, module: str) -> None:
        """Check that PEFT would put the factors of `module` to use.

        Raises:
            CheckpointError: it would leave them aside without a word.
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

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse the adapter over one field."""
        value = shorten(self.fields.get(name))
        raise CheckpointError(f"{self.where} has {name} = {value}, {why}: {MERGE_FIRST}")

    def _refuse_kind(self, kind: object) -> NoReturn:
        if isinstance(kind, str) and kind in _WITHOUT_WEIGHTS:
            raise CheckpointError(
                f"{self.where} is a {kind} adapter, which does not come down to weights of its "
                "base: it cannot be merged, train LoRA instead"
            )
        raise CheckpointError(
            f"{self.where} is an adapter of peft_type {shorten(kind)}, and LORA and ADALORA are "
            f"read: {MERGE_FIRST}"
        )

    def _refuse_target(self, module: str, name: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where} stores factors for '{module}', which {name} = "
            f"{shorten(self.fields.get(name))} does not cover, so that PEFT would not use them: "
            "the files are of different versions, fetch them again"
        )

    def _of_module(self, name: str, pattern_name: str, module: str) -> float:
        number = self._rank if name == "r" else self._number
        for pattern, value in self._patterns(pattern_name).items():
            if self._regex(pattern_name, rf"(.*\.)?({pattern})$").match(module):
                return number(pattern_name, value)
        return number(name, self.fields.get(name, 8))

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
            return bool(value) and self._regex(name, value).fullmatch(module) is not None
        return any(module == end or module.endswith(f".{end}") for end in self._texts(name))

    def _in_layers(self, module: str) -> bool:
        layers: object = self.fields.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self._texts("layers_pattern")
        found = [
            self._regex("layers_pattern", rf"(?:^|.*?\.){pattern}\.(\d+)\.").match(module)
            for pattern in patterns
        ] or [re.match(r".*?\.[^.]*\.(\d+)\.", module)]
        index = next((int(match[1]) for match in found if match), None)
        return index in cast("list[object]", layers if isinstance(layers, list) else [layers])

    def _texts(self, name: str) -> list[str]:
        value: object = self.fields.get(name)
        items = cast("list[object]", value if isinstance(value, list) else [value] if value else [])
        if not all(isinstance(item, str) for item in items):
            self.refuse(name, "which is a list of strings")
        return cast("list[str]", items)

    def _regex(self, name: str, pattern: str) -> re.Pattern[str]:
        if len(pattern) > _MAX_PATTERN:
            self.refuse(name, f"a pattern of more than {_MAX_PATTERN} characters")
        try:
            return re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{self.where}: {shorten(pattern)} in {name} is no regular expression ({error}): "
                "correct it"
            ) from error

    def _rank(self, name: str, value: object) -> int:
        if type(value) is not int or value < 1:
            self.refuse(name, "which is a positive whole number")
        return value

    def _number(self, name: str, value: object) -> float:
        number = value if isinstance(value, int | float) else math.nan
        if isinstance(value, bool) or not abs(number) < _MAX_NUMBER:
            self.refuse(name, "which is a finite number")
        return number
