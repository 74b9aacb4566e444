"""Adapters of mlx-lm and of AdapterHub's library `adapters`, read as PEFT's.

mlx-lm's scale · (lora_a lora_b)ᵀ is lora_alpha / r · B A. Of AdapterHub's, LoRA and (IA)³ on the outputs of
layers are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.layout import PREFIX, as_peft, refuse_tensor
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import as_object, shorten
from covmerge.files.checkpoints.pieces import Assembled

MLX_NAME = "adapters.safetensors"
_OF_MLX: Mapping[str, str] = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
MLX_ENDS = tuple(_OF_MLX)
_MAGNITUDE = ".m"
# Embeddings have factors a (rows, r) and b (r, d), and the update a b. For a layer this is B A.
_TABLES = ("embed_tokens", "embed_in", "tok_embeddings", "word_embeddings", "wte")
_TABLE_ENDS: Mapping[str, str] = {".lora_a": ".lora_B.weight", ".lora_b": ".lora_A.weight"}
_FUSE = (
    "fuse it with mlx-lm (mlx_lm.fuse --model BASE --adapter-path FOLDER --save-path NEW --dequantize), "
    "and merge NEW as a full model"
)


def mlx_factors(stored: Checkpoint, rank: int) -> Assembled:
    """Return mlx-lm's factors as PEFT's; those of layers are stored transposed."""
    headers = stored.headers
    names = {_peft_name(header, rank, stored.source): name for name, header in headers.items()}
    matrices = {new for new, old in names.items() if len(headers[old].shape) == 2}
    return as_peft(stored, names, {n for n in matrices if not _is_of_table(names[n])})


def mlx_fields(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
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
    given = as_object(fields.get("lora_parameters"))
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


def is_full_mlx(fields: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm trained whole tensors and wrote no factors."""
    return fields.get("fine_tune_type") == "full"


def _peft_name(header: TensorHeader, rank: int, where: str) -> str:
    module, dot, leaf = header.name.rpartition(".")
    end, table = dot + leaf, _is_of_table(header.name)
    if end == _MAGNITUDE and len(header.shape) == 1:
        return f"{PREFIX}{module}.lora_magnitude_vector"
    if end not in _OF_MLX:
        refuse_tensor(header, where, "mlx-lm, which is no factor of LoRA", _FUSE)
    if not table and "embed" in module.rpartition(".")[2]:
        what = "mlx-lm, of an embedding or a layer, which its name does not tell"
        refuse_tensor(header, where, what, _FUSE)
    if len(header.shape) != 2:
        refuse_tensor(header, where, "mlx-lm, of a stack of experts", _FUSE)
    if header.shape[1 if leaf == "lora_a" else 0] != rank:
        raise CheckpointError(
            f"{where}: '{header.name}' is of shape {list(header.shape)}, and lora_parameters has "
            f"rank = {rank}: correct that in adapter_config.json"
        )
    return f"{PREFIX}{module}{(_TABLE_ENDS if table else _OF_MLX)[end]}"


def _is_of_table(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in _TABLES


# AdapterHub.

ADAPTERHUB_NAMES = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_NAMES = ("model_head.safetensors", "pytorch_model_head.bin")
_FACTOR = re.compile(r"(.+)\.loras\.[^.]+\.(lora_[AB])")
_OF_ADAPTERHUB = {
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


def adapterhub_fields(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that PEFT has for an adapter of AdapterHub's library.

    Raises:
        CheckpointError: the adapter is neither LoRA nor (IA)³.
    """
    given = cast("dict[str, Any]", fields["config"])
    kind = given.get("architecture")
    if kind != "lora":
        _refuse_setting(where, "architecture", kind, _TRAIN)
    if given.get("use_gating"):
        _refuse_setting(where, "use_gating", given["use_gating"], _TRAIN)
    for name in ("use_dora", "vera_b", "vera_d"):
        if given.get(name) not in (None, False):
            # adapters 1.3.0 scales biases too while DoRA runs, and not when it merges it.
            _refuse_setting(
                where, name, given[name], _FOLD + _BIASES if name == "use_dora" else _FOLD
            )
    base = fields.get("base_model_name_or_path", fields.get("model_name"))
    found = {"base_model_name_or_path": base}
    rank, alpha = given.get("r"), given.get("alpha")
    if given.get("composition_mode", "add") == "add":
        return found | {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    if (given["composition_mode"], rank, alpha) != ("scale", 1, 1):
        _refuse_setting(where, "composition_mode", given["composition_mode"], _FOLD)
    return found | {"peft_type": "IA3", "feedforward_modules": []}


def adapterhub_factors(stored: Checkpoint, fields: Mapping[str, Any]) -> Assembled:
    """Return the factors of a file as PEFT's, l `(d_out, 1)`; `fields` are of `adapterhub_fields`."""
    ends = _OF_ADAPTERHUB[fields["peft_type"]]
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
    return as_peft(stored, names)


def _refuse_setting(where: str, name: str, value: object, step: str) -> NoReturn:
    raise CheckpointError(
        f"{where} is an adapter of AdapterHub's library with {name} = {shorten(value)}, of which "
        f"covmerge reads LoRA and (IA)³: {step}"
    )
