"""Types of adapters: a file each, and a row in the table of those that are read or refused."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import TensorHeader
from covmerge.files.adapters.types.bdlora import BDLORA
from covmerge.files.adapters.types.beft import BEFT
from covmerge.files.adapters.types.boft import BOFT
from covmerge.files.adapters.types.c3a import C3A
from covmerge.files.adapters.types.deft import DEFT
from covmerge.files.adapters.types.delora import DELORA
from covmerge.files.adapters.types.diff import DIFF
from covmerge.files.adapters.types.dora import MAGNITUDE, with_magnitude
from covmerge.files.adapters.types.fourierft import FOURIERFT
from covmerge.files.adapters.types.frod import FROD
from covmerge.files.adapters.types.glora import GLORA
from covmerge.files.adapters.types.gralora import GRALORA
from covmerge.files.adapters.types.hira import HIRA
from covmerge.files.adapters.types.hra import HRA
from covmerge.files.adapters.types.ia3 import IA3
from covmerge.files.adapters.types.kasa import KASA
from covmerge.files.adapters.types.layer import AdapterType
from covmerge.files.adapters.types.ln_tuning import LN_TUNING
from covmerge.files.adapters.types.locon import LOCON
from covmerge.files.adapters.types.loha import LOHA
from covmerge.files.adapters.types.lokr import LOKR
from covmerge.files.adapters.types.lycoris_glora import LYCORIS_GLORA
from covmerge.files.adapters.types.lycoris_ia3 import LYCORIS_IA3
from covmerge.files.adapters.types.lycoris_oft import LYCORIS_OFT
from covmerge.files.adapters.types.miss import MISS
from covmerge.files.adapters.types.oft import OFT
from covmerge.files.adapters.types.osf import OSF
from covmerge.files.adapters.types.pissa import OLORA, PISSA
from covmerge.files.adapters.types.pvera import PVERA
from covmerge.files.adapters.types.randlora import RANDLORA
from covmerge.files.adapters.types.road import ROAD
from covmerge.files.adapters.types.shira import SHIRA
from covmerge.files.adapters.types.supertuning import SUPERTUNING
from covmerge.files.adapters.types.tinylora import TINYLORA
from covmerge.files.adapters.types.tokens import TRAINABLE_TOKENS
from covmerge.files.adapters.types.unilora import UNILORA
from covmerge.files.adapters.types.vblora import VBLORA
from covmerge.files.adapters.types.vera import VERA
from covmerge.files.adapters.types.waveft import WAVEFT

_ALL = (
    *(
        BEFT,
        BOFT,
        C3A,
        DEFT,
        DELORA,
        FOURIERFT,
        FROD,
        GLORA,
        GRALORA,
        HIRA,
        HRA,
        IA3,
        LN_TUNING,
        LOHA,
    ),
    *(
        LOKR,
        MISS,
        OFT,
        OSF,
        PVERA,
        RANDLORA,
        ROAD,
        SHIRA,
        SUPERTUNING,
        TINYLORA,
        TRAINABLE_TOKENS,
        UNILORA,
    ),
    *(VBLORA, VERA, WAVEFT),
)
TYPES: Mapping[str, AdapterType] = {kind.name: kind for kind in _ALL}
FORMER: Mapping[str, AdapterType] = {"BONE": MISS}  # names that PEFT has no more
# What LoRA is by a field of its configuration.
LORA_INITS: Mapping[str, AdapterType] = {"pissa": PISSA, "olora": OLORA}
LORA_FIELDS: Mapping[str, AdapterType] = {"kasa_config": KASA, "use_bdlora": BDLORA}
# Of files without a configuration.
OF_FILES = (LOCON, LOHA, LOKR, LYCORIS_OFT, LYCORIS_IA3, LYCORIS_GLORA, DIFF)

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
    kind = next((one for one in OF_FILES if not one.marks.isdisjoint(parts)), _by_field(fields))
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
