"""Types of adapters: a file each, and a row in the table of those that are read or refused."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.adapter_types.beft import BEFT
from covmerge.files.checkpoints.adapter_types.boft import BOFT
from covmerge.files.checkpoints.adapter_types.c3a import C3A
from covmerge.files.checkpoints.adapter_types.delora import DELORA
from covmerge.files.checkpoints.adapter_types.diff import DIFF, DIFFERENCE
from covmerge.files.checkpoints.adapter_types.dora import MAGNITUDE, with_magnitude
from covmerge.files.checkpoints.adapter_types.fourierft import FOURIERFT
from covmerge.files.checkpoints.adapter_types.gralora import GRALORA
from covmerge.files.checkpoints.adapter_types.hira import HIRA
from covmerge.files.checkpoints.adapter_types.hra import HRA
from covmerge.files.checkpoints.adapter_types.ia3 import IA3
from covmerge.files.checkpoints.adapter_types.layer import AdapterType
from covmerge.files.checkpoints.adapter_types.ln_tuning import LN_TUNING
from covmerge.files.checkpoints.adapter_types.locon import LOCON, MIDDLE
from covmerge.files.checkpoints.adapter_types.loha import LOHA
from covmerge.files.checkpoints.adapter_types.lokr import LOKR
from covmerge.files.checkpoints.adapter_types.miss import MISS
from covmerge.files.checkpoints.adapter_types.oft import OFT
from covmerge.files.checkpoints.adapter_types.randlora import RANDLORA
from covmerge.files.checkpoints.adapter_types.road import ROAD
from covmerge.files.checkpoints.adapter_types.shira import SHIRA
from covmerge.files.checkpoints.adapter_types.tokens import TRAINABLE_TOKENS
from covmerge.files.checkpoints.adapter_types.vblora import VBLORA
from covmerge.files.checkpoints.adapter_types.vera import VERA

_ALL = (
    *(
        BEFT,
        BOFT,
        C3A,
        DELORA,
        FOURIERFT,
        GRALORA,
        HIRA,
        HRA,
        IA3,
        LN_TUNING,
        LOHA,
        LOKR,
        MISS,
        OFT,
    ),
    *(RANDLORA, ROAD, SHIRA, TRAINABLE_TOKENS, VBLORA, VERA),
)
TYPES: Mapping[str, AdapterType] = {kind.name: kind for kind in _ALL}
# Of files without a configuration.
OF_FILES = (LOCON, LOHA, LOKR, DIFF)

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
# PEFT's types whose update is a weight, and that are not read.
NOT_READ: Mapping[str, str] = {
    kind: "its update is a weight, and PEFT's own merge gives it: no reader of its tensors is here"
    for kind in (
        *("ADAMSS", "DEFT", "FROD", "GLORA", "OSF", "PSOFT", "PVERA", "SUPERTUNING", "TINYLORA"),
        *("UNILORA", "WAVEFT"),
    )
}


def kind_of(parts: Mapping[str, TensorHeader], *, by_itself: bool) -> AdapterType | None:
    """Return the type of a layer by its parts; None: plain LoRA.

    Args:
        parts: what the adapter has of the layer.
        by_itself: the file is without configuration, as Kohya's and LyCORIS's are.
    """
    kind = LOCON if MIDDLE in parts else None
    kind = DIFF if DIFFERENCE in parts else kind
    kind = LOHA if "w1_a" in parts else kind
    kind = LOKR if any(part.startswith("kron_") for part in parts) else kind
    if MAGNITUDE not in parts:
        return kind
    shape = parts[MAGNITUDE].shape
    columns = by_itself and len(shape) > 1 and shape[0] == 1 < max(shape)
    return with_magnitude(kind or LOCON, columns=columns)
