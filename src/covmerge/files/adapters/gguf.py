"""LoRA adapters in GGUF, as llama.cpp's convert_lora_to_gguf.py writes them, read as PEFT's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.config import AdapterConfig
from covmerge.files.adapters.layout import PREFIX, as_peft, refuse_tensor
from covmerge.files.adapters.names import Update
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import QUANTISATION
from covmerge.files.checkpoints.json_file import as_object, shorten
from covmerge.files.checkpoints.pieces import Assembled
from covmerge.files.quantised.gguf_file import GgufSettings, gguf_package

# Architectures for which it is known how llama.cpp's converter orders rows: it permutes only
# Llama's q and k.
ARCHITECTURES = frozenset(
    {
        *("gemma", "gemma2", "gemma3", "llama", "nemotron", "phi3", "qwen2", "qwen2moe", "qwen3"),
        *("qwen3moe", "starcoder2"),
    }
)
_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_ENDS: Mapping[str, str] = {".weight.lora_a": ".lora_A.weight", ".weight.lora_b": ".lora_B.weight"}
# A of the token table is stored transposed, but B is not.
_TABLE = "token_embd"
_TABLE_ENDS = {".weight.lora_a": ".lora_embedding_A", ".weight.lora_b": ".lora_embedding_B"}
_STEP = "merge the adapter that it was converted from"


def gguf_adapter(stored: Checkpoint) -> GgufSettings | None:
    """Return a GGUF file's settings if the file is an adapter, else None."""
    settings = (stored.config or {}).get(QUANTISATION)
    if not isinstance(settings, GgufSettings):
        return None
    return settings if settings.metadata.get("general.type") == "adapter" else None


def gguf_factors(stored: Checkpoint, settings: GgufSettings) -> tuple[Assembled, AdapterConfig]:
    """Return a GGUF file's factors as PEFT's, with the configuration that PEFT would have.

    Raises:
        CheckpointError: the file is no LoRA of plain matrices, or has no alpha.
    """
    names = {_peft_name(h, stored.source): name for name, h in stored.headers.items()}
    found = as_peft(stored, names, {n for n in names if n.endswith(_TABLE_ENDS[".weight.lora_a"])})
    found.config = None
    metadata = settings.metadata
    alpha, kind = metadata.get("adapter.lora.alpha"), metadata.get("adapter.type")
    if kind != "lora" or not isinstance(alpha, float):
        raise CheckpointError(
            f"{stored.source} has adapter.type = {kind} and adapter.lora.alpha = {alpha}, and a LoRA "
            f"with a number is read: convert it again, or {_STEP}"
        )
    # llama.cpp's scale is alpha over each factor's own rank; an alpha of 0 means the scale 1.
    ranks = {
        re.escape(name.removeprefix(PREFIX).removesuffix(end)): header.shape[0]
        for name, header in found.headers.items()
        for end in (".lora_A.weight", ".lora_embedding_A")
        if name.endswith(end)
    }
    fields = {
        "peft_type": "LORA",
        "r": next(iter(ranks.values()), 1),
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        **({} if alpha else {"alpha_pattern": ranks}),
    }
    architecture = str(metadata.get("general.architecture"))
    return found, AdapterConfig(stored.source, fields, architecture=architecture)


def named_by_base(
    updates: Mapping[str, Update],
    base: Mapping[str, TensorHeader],
    config: Mapping[str, Any],
    architecture: str,
    where: str,
) -> dict[str, Update]:
    """Return llama.cpp's updates with the names and the orders of rows of transformers' tensors.

    Raises:
        CheckpointError: the architecture is not read, or the base does not say its number of heads.
    """
    names = _names(updates, base, architecture, where)
    found: dict[str, Update] = {}
    for name, update in updates.items():
        target = names.get(name, name)
        order = _order(name, update.shape[0], config, architecture, where)
        found[target] = replace(update, name=target, order=order, written=name)
    return found


def _names(
    updates: Iterable[str], base: Iterable[str], architecture: str, where: str
) -> dict[str, str]:
    """Return the base's tensor names, by llama.cpp's names for them."""
    package = gguf_package()
    known = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    if architecture not in ARCHITECTURES or architecture not in known:
        raise CheckpointError(
            f"{where} is of the architecture '{architecture}', and those that are read are "
            f"{', '.join(sorted(ARCHITECTURES))}: {_STEP}"
        )
    blocks = [int(name.split(".")[1]) for name in updates if name.startswith("blk.")]
    table = package.get_tensor_name_map(known[architecture], max(blocks, default=0) + 1)
    pairs = ((table.get_name(name, try_suffixes=(".weight",)), name) for name in base)
    return {in_gguf: name for in_gguf, name in pairs if in_gguf is not None}


def _order(
    name: str, rows: int, config: Mapping[str, Any], architecture: str, where: str
) -> tuple[int, ...] | None:
    """Return for each row of a tensor the number of its stored row; None: the order is the same.

    In llama.cpp's order, the two rows of a pair in Llama's q and k are neighbours.
    """
    side = next((part for part in _HEADS if f".{part}." in name), None)
    if architecture != "llama" or side is None:
        return None
    settings = as_object(config.get("text_config")) or config
    heads = settings.get(_HEADS[side]) or settings.get("num_attention_heads")
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            f"{where}: the order of the {rows} rows of '{name}' goes by the heads, of which the base has "
            f"{shorten(heads)}: pass the base with its config.json, or {_STEP}"
        )
    order = torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
    return tuple(int(row) for row in order)


def _peft_name(header: TensorHeader, where: str) -> str:
    end = next((end for end in _ENDS if header.name.endswith(end)), None)
    if end is None:
        refuse_tensor(header, where, "GGUF, which is no factor of a weight", _STEP)
    if len(header.shape) != 2:
        refuse_tensor(header, where, "GGUF, of a stack of experts", _STEP)
    if header.dtype is torch.uint8:
        raise CheckpointError(
            f"{where}: '{header.name}' is quantised: convert the adapter with --outtype f32"
        )
    module = header.name.removesuffix(end)
    return f"{PREFIX}{module}{(_TABLE_ENDS if module == _TABLE else _ENDS)[end]}"
