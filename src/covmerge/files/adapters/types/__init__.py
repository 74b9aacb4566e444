"""Types of adapters: one file for each family, which lists its types; and the types that are refused."""

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
FORMER: Mapping[str, AdapterType] = {"BONE": structured.MISS}  # names that PEFT no longer has
# Types that LoRA becomes by one field of its configuration.
LORA_INITS: Mapping[str, AdapterType] = {"pissa": lora.PISSA, "olora": lora.OLORA}
LORA_FIELDS: Mapping[str, AdapterType] = {
    "kasa_config": lora.KASA,
    "use_bdlora": lora.BDLORA,
}

_PROMPT = "it is tokens before the input or keys and values beside it, and no weight"
_INPUT = "which of its parts act is decided by the input, so that it is no weight"
# Adapters that are no weights of the base, whatever library reads them.
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
# Types whose weights the file and the base do not determine; only the library that made them can merge.
NOT_READ: Mapping[str, str] = {
    "ADAMSS": "which rows its blocks are of is a clustering of the base by scikit-learn that is not stored",
    "PSOFT": "its numbers go by the base's singular vectors, whose signs are those of the library that "
    "computed them and are not stored",
}


def kind_of(parts: Mapping[str, TensorHeader], fields: Mapping[str, object]) -> AdapterType | None:
    """Return the type of a layer from its parts and the configuration's fields; None: plain LoRA."""
    kind = next((one for one in OF_FILES if not one.marks.isdisjoint(parts)), None)
    # PEFT starts the factors of an embedding in the plain way, whatever `init_lora_weights` says.
    if kind is None and "table_down" not in parts:
        init = fields.get("init_lora_weights")
        kind = LORA_INITS.get(init) if isinstance(init, str) else None
        kind = kind or next((kind for name, kind in LORA_FIELDS.items() if fields.get(name)), None)
    if MAGNITUDE not in parts:
        return kind
    name, shape = parts[MAGNITUDE].name, parts[MAGNITUDE].shape
    # LyCORIS may have a magnitude for each column. PEFT's for a convolution has the same shape, but
    # is by rows.
    columns = name.endswith(".dora_scale") and len(shape) > 1 and shape[0] == 1
    return with_magnitude(kind or LOCON, columns=columns)
