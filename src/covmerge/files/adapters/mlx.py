"""mlx-lm's adapters, read in PEFT's format: scale · (lora_a lora_b)ᵀ is lora_alpha / r · B A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.layout import PREFIX, AsPeft
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import shorten

MLX_NAME = "adapters.safetensors"
_PEFT_ENDS: Mapping[str, str] = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
MLX_ENDS = tuple(_PEFT_ENDS)
_MAGNITUDE = ".m"
# Embeddings have factors a (rows, r) and b (r, d), and the update a b. For a layer this is B A.
_TABLES = ("embed_tokens", "embed_in", "tok_embeddings", "word_embeddings", "wte")
_TABLE_ENDS: Mapping[str, str] = {".lora_a": ".lora_B.weight", ".lora_b": ".lora_A.weight"}
_FUSE = (
    "fuse it with mlx-lm (mlx_lm.fuse --model BASE --adapter-path FOLDER --save-path NEW --dequantize), "
    "and merge NEW as a full model"
)


def mlx_factors(stored: Checkpoint, rank: int) -> AsPeft:
    """Return mlx-lm's factors as PEFT's; those of layers are stored transposed."""
    headers = stored.headers
    names = {_peft_name(header, rank, stored.source): name for name, header in headers.items()}
    matrices = {new for new, old in names.items() if len(headers[old].shape) == 2}
    return AsPeft(stored, names, {n for n in matrices if not _is_of_table(names[n])})


def peft_fields(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's configuration for the configuration of an mlx-lm adapter.

    Raises:
        CheckpointError: the adapter is no LoRA, or its rank or its scale is missing.
    """
    kind: object = fields.get("fine_tune_type", "lora")
    base = fields.get("base_model_name_or_path", fields.get("model"))
    if kind == "full":
        return {"peft_type": "LORA", "base_model_name_or_path": base}
    if kind not in ("lora", "dora"):
        raise CheckpointError(f"{where} has fine_tune_type = {shorten(kind)} of mlx-lm: {_FUSE}")
    found = cast("object", fields.get("lora_parameters"))
    given = cast("dict[str, object]", found if isinstance(found, dict) else {})
    rank, scale = given.get("rank"), given.get("scale")
    if type(rank) is not int or rank < 1 or type(scale) not in (int, float):
        raise CheckpointError(
            f"{where} has lora_parameters = {shorten(fields.get('lora_parameters'))}, and mlx-lm's state "
            "a rank and a scale, which multiplies the update: add those that it was trained with to "
            "adapter_config.json"
        )
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": cast("float", scale) * rank,
        "use_dora": kind == "dora",
        "base_model_name_or_path": base,
    }


def is_full(fields: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm trained whole tensors and wrote no factors."""
    return fields.get("fine_tune_type") == "full"


def _peft_name(header: TensorHeader, rank: int, where: str) -> str:
    module, dot, leaf = header.name.rpartition(".")
    end, table = dot + leaf, _is_of_table(header.name)
    if end == _MAGNITUDE and len(header.shape) == 1:
        return f"{PREFIX}{module}.lora_magnitude_vector"
    if end not in _PEFT_ENDS:
        _refuse(header, where, "which is no factor of LoRA")
    if not table and "embed" in module.rpartition(".")[2]:
        _refuse(header, where, "of an embedding or a layer, which its name does not tell")
    if len(header.shape) != 2:
        _refuse(header, where, "of a stack of experts")
    if header.shape[1 if leaf == "lora_a" else 0] != rank:
        raise CheckpointError(
            f"{where}: '{header.name}' is of shape {list(header.shape)}, and lora_parameters has "
            f"rank = {rank}: correct that in adapter_config.json"
        )
    return f"{PREFIX}{module}{(_TABLE_ENDS if table else _PEFT_ENDS)[end]}"


def _is_of_table(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in _TABLES


def _refuse(header: TensorHeader, where: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: '{header.name}' of shape {list(header.shape)} is a tensor of mlx-lm, {why}: {_FUSE}"
    )
