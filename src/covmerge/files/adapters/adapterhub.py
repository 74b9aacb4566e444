"""Adapters of AdapterHub's library `adapters`, read as PEFT's: LoRA, and (IA)³ on the outputs of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from covmerge.base.errors import CheckpointError
from covmerge.files.adapters.layout import PREFIX, AsPeft
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import shorten

ADAPTERHUB_NAMES = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_NAMES = ("model_head.safetensors", "pytorch_model_head.bin")
_FACTOR = re.compile(r"(.+)\.loras\.[^.]+\.(lora_[AB])")
_PEFT_ENDS = {
    "LORA": {"lora_A": ".lora_A.weight", "lora_B": ".lora_B.weight"},
    "IA3": {"lora_B": ".ia3_l"},
}
_TRAIN = "train LoRA instead. Such an adapter is no change of the base's weights"
_FOLD = (
    "merge it into its base with adapters (model.load_adapter(FOLDER), model.merge_adapter(NAME), "
    "model.delete_adapter(NAME), model.save_pretrained(NEW)), and merge NEW as a full model"
)
_BIASES = ". Biases of these layers stay as they were, and the running adapter scales them"


def is_of_adapterhub(fields: Mapping[str, Any]) -> bool:
    """Return whether adapter_config.json is of AdapterHub's library: its settings lie under `config`."""
    return "peft_type" not in fields and isinstance(fields.get("config"), dict)


def as_peft(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that PEFT has for an adapter of AdapterHub's library.

    Args:
        where: the adapter, for errors.
        fields: of adapter_config.json.

    Raises:
        CheckpointError: the adapter is neither LoRA nor (IA)³.
    """
    given = cast("dict[str, Any]", fields["config"])
    kind = given.get("architecture")
    if kind != "lora":
        _refuse(where, "architecture", kind, _TRAIN)
    if given.get("use_gating"):
        _refuse(where, "use_gating", given["use_gating"], _TRAIN)
    for name in ("use_dora", "vera_b", "vera_d"):
        if given.get(name) not in (None, False):
            # adapters 1.3.0 scales biases too while DoRA runs, and not when it merges it.
            _refuse(where, name, given[name], _FOLD + _BIASES if name == "use_dora" else _FOLD)
    base = fields.get("base_model_name_or_path", fields.get("model_name"))
    found = {"base_model_name_or_path": base}
    rank, alpha = given.get("r"), given.get("alpha")
    if given.get("composition_mode", "add") == "add":
        return found | {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    if (given["composition_mode"], rank, alpha) != ("scale", 1, 1):
        _refuse(where, "composition_mode", given["composition_mode"], _FOLD)
    return found | {"peft_type": "IA3", "feedforward_modules": []}


def adapterhub_factors(stored: Checkpoint, fields: Mapping[str, Any]) -> AsPeft:
    """Return the factors of a file as PEFT's, l `(d_out, 1)`; the fields are those of `as_peft`."""
    ends = _PEFT_ENDS[fields["peft_type"]]
    names: dict[str, str] = {}
    rank = fields.get("r", 1)
    for name, header in stored.headers.items():
        match = _FACTOR.fullmatch(name)
        end = ends.get(match[2]) if match else None
        # The factors of a fused projection are the factors of its parts, stacked: its A has more rows.
        axis = 0 if end == ".lora_A.weight" else 1
        known = len(header.shape) == 2 and header.shape[axis] == rank
        if match is None or end is None or not known:
            raise CheckpointError(
                f"{stored.source}: '{name}' of shape {list(header.shape)} is no factor of a layer of "
                f"rank {rank}: {_FOLD}"
            )
        to = f"{PREFIX}{match[1]}{end}"
        if to in names:
            raise CheckpointError(
                f"{stored.source} has both '{names[to]}' and '{name}', of two adapters: save each to a "
                "folder of its own, model.save_adapter(FOLDER, NAME)"
            )
        names[to] = name
    return AsPeft(stored, names)


def _refuse(where: str, name: str, value: object, step: str) -> NoReturn:
    raise CheckpointError(
        f"{where} is an adapter of AdapterHub's library with {name} = {shorten(value)}, of which "
        f"covmerge reads LoRA and (IA)³: {step}"
    )
