"""Types of adapters: a file a family, which lists its own; and the types that are refused."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import TensorHeader
from covmerge.files.adapters.types import entries, lora, lycoris, rotations, shared, structured
from covmerge.files.adapters.types.layer import AdapterType
from covmerge.files.adapters.types.lora import MAGNITUDE, with_magnitude
from covmerge.files.adapters.types.lycoris import LOCON, OF_FILES

_FAMILIES = (entries, lora, lycoris, rotations, shared, structured)
TYPES: Mapping[str, AdapterType] = {
    kind.name: kind for family in _FAMILIES for kind in family.TYPES
}
FORMER: Mapping[str, AdapterType] = {"BONE": structured.MISS}  # names that PEFT has no more
# What LoRA is by a field of its configuration.
LORA_INITS: Mapping[str, AdapterType] = {"pissa": lora.PISSA, "olora": lora.OLORA}
LORA_FIELDS: Mapping[str, AdapterType] = {
    "kasa_config": lora.KASA,
    "use_bdlora": lora.BDLORA,
}

_PROMPT = "it is tokens before the input or keys and values beside it, and no weight"
_INPUT = "which of its parts act is decided by the input, so that it is no weight"
# No weights of the base, whatever reads it.
WITHOUT_WEIGHTS: Mapping[str, str] = {
    "ADAPTION_PROMPT": _PROMPT,
    "CARTRIDGE": _PROMPT,
    "CPT": _PROMPT,
    "LILY": _INPUT,
    "MULTITASK_PROMPT_TUNING": _PROMPT,
    "PEANUT": "it is a network beside the layer, with a nonlinearity, and no weight",
    "POLY": "which of its parts act is decided by the task of each input, so that it is no weight",
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "P_TUNING": _PROMPT,
    "SHADOW": "it is a network beside the model, and no weight",
    "XLORA": _INPUT,
}
# Weights that the file and the base do not determine, so that only the library that made it can merge it.
NOT_READ: Mapping[str, str] = {
    "ADAMSS": "which rows its blocks are of is a clustering of the base by scikit-learn that is not stored",
    "PSOFT": "its numbers go by the base's singular vectors, whose signs are those of the library that "
    "computed them and are not stored",
}


def kind_of(parts: Mapping[str, TensorHeader], fields: Mapping[str, object]) -> AdapterType | None:
    """Return the type of a layer of LoRA or of a file, by its parts; None: plain LoRA.

    Args:
        parts: what the adapter has of the layer.
        fields: its configuration; of a file by itself none.
    """
    kind = next((one for one in OF_FILES if not one.marks.isdisjoint(parts)), None)
    # PEFT begins an embedding as any other LoRA, whatever the init.
    if kind is None and "table_down" not in parts:
        kind = _by_field(fields)
    if MAGNITUDE not in parts:
        return kind
    name, shape = parts[MAGNITUDE].name, parts[MAGNITUDE].shape
    # LyCORIS's may be of columns; PEFT's of a convolution lies so too, and is of rows.
    columns = name.endswith(".dora_scale") and len(shape) > 1 and shape[0] == 1 < max(shape)
    return with_magnitude(kind or LOCON, columns=columns)


def _by_field(fields: Mapping[str, object]) -> AdapterType | None:
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init in LORA_INITS:
        return LORA_INITS[init]
    return next((kind for name, kind in LORA_FIELDS.items() if fields.get(name)), None)
