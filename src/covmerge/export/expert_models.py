"""Models per expert beside a unified one: masks and factors (EMR-Merging), and how to load them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covmerge.checkpoints import MASKS_FOLDER, Checkpoint, open_checkpoint, unpack
from covmerge.checkpoints.disk import disk_errors
from covmerge.checkpoints.json_file import read_object
from covmerge.checkpoints.strict_json import dumps
from covmerge.errors import CheckpointError, InputError, did_you_mean
from covmerge.methods.emr import rescalers

_FILE = "rescalers.json"


def rescalers_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the factor of each expert from the statistics of a run's tensors.

    Args:
        entries: by tensor, as in `covmerge.json`; tensors of other methods are passed over.
    """
    masked = [entry for entry in entries.values() if _is_masked(entry)]
    experts = list(dict.fromkeys(expert for entry in masked for expert in entry["update_norm"]))
    per_tensor = [_sums(entry, experts) for entry in masked]
    return dict(zip(experts, rescalers(per_tensor), strict=True)) if masked else {}


def _is_masked(entry: Mapping[str, Any]) -> bool:
    return any("kept_mass" in block for block in entry.get("matrices", ()))


def _sums(entry: Mapping[str, Any], experts: list[str]) -> dict[str, Any]:
    """Add up the row blocks of a tensor; an expert that lacks it adds nothing."""
    places = {expert: place for place, expert in enumerate(entry["update_norm"])}
    blocks = entry["matrices"]

    def total(key: str, expert: str) -> float:
        place = places.get(expert)
        return 0.0 if place is None else sum(block[key][place] for block in blocks)

    return {
        "size": sum(block["size"] for block in blocks),
        "expert_mass": [total("expert_mass", expert) for expert in experts],
        "kept_mass": [total("kept_mass", expert) for expert in experts],
    }


def write_rescalers(folder: Path, factors: Mapping[str, float]) -> None:
    """Write masks/rescalers.json.

    Raises:
        ResourceError: the disk is full.
    """
    path = folder / MASKS_FOLDER / _FILE
    content = dumps(factors, what="rescalers", indent=1).encode() + b"\n"
    with disk_errors(path, len(content)):
        path.write_bytes(content)


def load_expert(
    folder: str | Path, expert: str, base: str | Path | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that one expert of an EMR merge runs with.

    W_t = W_0 + γ_t m_t ⊙ (W̄ − W_0)  (EMR-Merging, Mask and Rescale)

    Tensors that were not merged by EMR are those of the unified model. The unified update is as
    precise as the dtype that the model was stored in.

    Args:
        folder: output of `covmerge merge --method emr`.
        expert: name of the expert.
        base: the base that the experts were merged over.

    Returns:
        A state dict in the dtypes of the unified model, with the expert's own task head if one was
        kept.

    Raises:
        InputError: no masks there, or none of this expert.

    Departs from the paper: nowhere.

    Example:
        >>> import covmerge, tempfile
        >>> base = {"fc.weight": torch.zeros(1, 2)}
        >>> experts = {"a": {"fc.weight": torch.tensor([[3.0, -1.0]])},
        ...            "b": {"fc.weight": torch.tensor([[1.0, 2.0]])}}
        >>> out = tempfile.mkdtemp() + "/merged"
        >>> _ = covmerge.merge(base, experts, method="emr", out=out)
        >>> covmerge.load_expert(out, "a", base)["fc.weight"].tolist()
        [[4.0, 0.0]]
    """
    folder = Path(folder)
    factors = _read_rescalers(folder)
    if expert not in factors:
        raise InputError(f"{folder} has no expert '{expert}'." + did_you_mean(expert, factors))
    with ExitStack() as stack:

        def opened(source: str | Path | Mapping[str, Tensor]) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            checkpoint.materialize()
            return checkpoint

        unified, start = opened(folder), opened(base)
        masks = opened(folder / MASKS_FOLDER / f"{expert}.safetensors")
        weights = {name: unified.read(name) for name in unified.headers}
        for name in masks.headers:
            mask = unpack(masks.read(name), unified.headers[name].shape)
            origin = start.read(name).to(torch.float32)
            update = (weights[name].to(torch.float32) - origin) * mask * factors[expert]
            weights[name] = (origin + update).to(weights[name].dtype)
        head = folder / "heads" / f"{expert}.safetensors"
        if head.is_file():
            own = opened(head)
            weights.update({name: own.read(name) for name in own.headers})
    return weights


def _read_rescalers(folder: Path) -> dict[str, float]:
    path = folder / MASKS_FOLDER / _FILE
    if not path.is_file():
        raise InputError(
            f"{folder} has no {MASKS_FOLDER}/{_FILE}: it is no output of a method that writes masks "
            "(emr)"
        )
    factors = read_object(path)
    if not all(isinstance(value, int | float) for value in factors.values()):
        raise CheckpointError(f"{path} does not map experts to numbers: merge again")
    return factors
