"""Each expert's own masks and rescaler beside a unified model (EMR-Merging), and their loading."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError, InputError, TensorError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, fingerprint
from covmerge.files.checkpoints.folder import open_file
from covmerge.files.checkpoints.hashes import sha256_of
from covmerge.files.checkpoints.json_file import dumps, read_object, shorten
from covmerge.files.checkpoints.layout import MASKS_FOLDER, packed_header
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.quantised.view import open_plain
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store, StoredFile, file_at
from covmerge.files.tensors.shown import seen_untied
from covmerge.maths.linalg.masks import unpack
from covmerge.maths.linalg.stored import stored_as
from covmerge.plan.statistics.file import probe

_FILE = "rescalers.json"
BASE_PROBE = "base_probe"  # key in covmerge.json of the hash that identifies the base


def write_rescalers(store: LocalFolder, factors: Mapping[str, float]) -> str:
    """Write masks/rescalers.json with each expert's factor and the hash of its masks; return its path."""
    masks = store.inside(MASKS_FOLDER)
    records: dict[str, Json] = {
        expert: {"rescaler": factor, "sha256": sha256_of(StoredFile(masks, _masks_of(expert)))}
        for expert, factor in factors.items()
    }
    content = dumps(records, what="rescalers", indent=1).encode() + b"\n"
    masks.put(_FILE, content)
    return f"{MASKS_FOLDER}/{_FILE}"


def _masks_of(expert: str) -> str:
    return f"{expert}.safetensors"


def load_expert(
    folder: str | Path, expert: str, base: str | Path | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that one expert of an EMR merge runs with.

    W_t = W_0 + γ_t m_t ⊙ (W̄ − W_0)  (EMR-Merging, Mask and Rescale)

    Tensors that EMR did not merge are taken from the unified model. The unified update has the
    precision of the dtype that the unified model is stored in.

    Args:
        folder: an output of `covmerge merge --method emr`.
        expert: name of the expert.
        base: the base that the experts were merged over.

    Returns:
        A state dict in the dtypes of the unified model, with the expert's own task head if one was
        kept.

    Raises:
        InputError: the folder has no masks, or none of this expert; or the base is another.
        CheckpointError: masks, factors or weights are not those that the merge wrote.

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
    factor, file = find_masks(LocalFolder(folder), expert)
    manifest = read_manifest(folder)
    with ExitStack() as stack:

        def opened(source: str | Path | Mapping[str, Tensor]) -> Checkpoint:
            checkpoint = open_plain(source)
            stack.callback(checkpoint.close)
            checkpoint.materialize()
            return checkpoint

        unified, masks = opened(folder), open_file(str(file), file)
        start = seen_untied(opened(base), manifest.get("untied"))
        stack.callback(masks.close)
        _check_base(folder, manifest, start)
        _check_weights(manifest, unified)
        headers = dict(unified.headers)
        weights = {name: unified.read(name) for name in headers}
        for name in masks.headers:
            _check_shapes(name, masks, unified, start)
            mask = unpack(masks.read(name), unified.headers[name].shape)
            wide = torch.float64 if weights[name].dtype is torch.float64 else torch.float32
            origin = start.read(name).to(wide)
            update = (weights[name].to(wide) - origin) * mask * factor
            try:
                weights[name] = stored_as(origin + update, weights[name].dtype)
            except OverflowError as error:
                raise TensorError(
                    f"'{name}': the weights of expert '{expert}' overflow the dtype of the merged model "
                    f"({error}): merge to another dtype ({Hint('out_dtype', 'float32')})"
                ) from error
        head = folder / "heads" / f"{expert}.safetensors"
        if head.is_file():
            weights_of_head = opened(head)
            _check_weights(manifest, weights_of_head, "heads/")
            weights.update({name: weights_of_head.read(name) for name in weights_of_head.headers})
            headers.update(weights_of_head.headers)
    return {
        name: torch.view_as_complex(weight) if headers[name].complex else weight
        for name, weight in weights.items()
    }


def find_masks(store: Store, expert: str) -> tuple[float, StoredFile]:
    """Return an expert's factor and the file of its masks, after checking that the merge wrote them.

    Raises:
        InputError: the store has no masks, or none of this expert.
        CheckpointError: masks or factors are not those that the merge wrote.
    """
    path = file_at(store, f"{MASKS_FOLDER}/{_FILE}")
    if not path.store.is_file(_FILE):
        raise InputError(
            f"{store} has no {MASKS_FOLDER}/{_FILE}: it is no output of a method that writes masks "
            "(emr)"
        )
    records = read_object(path)
    if expert not in records:
        raise InputError(f"{store} has no expert '{expert}'." + did_you_mean(expert, records))
    record: Any = records[expert]
    try:
        factor, digest = record["rescaler"], record["sha256"]
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} has no rescaler of '{expert}': merge again") from error
    if not isinstance(factor, float) or not 0.0 < factor < inf:
        raise CheckpointError(
            f"{path}: the rescaler of '{expert}' is {shorten(factor)}: merge again"
        )
    masks = file_at(store, f"{MASKS_FOLDER}/{_masks_of(expert)}")
    why = ""
    if masks.store.is_file(masks.name):
        try:  # the header first: hashing a file that goes on after its tensors may never end
            open_file(str(masks), masks).close()
            if sha256_of(masks) == digest:
                return factor, masks
        except CheckpointError as error:
            why = f" ({error})"
    raise CheckpointError(f"{masks} is not the file that the merge wrote{why}: merge again")


def _check_base(folder: Path, manifest: Mapping[str, Any], base: Checkpoint) -> None:
    """Raise if the base is not the one that was merged, by its files' hashes or else by its probe."""
    known = manifest.get(BASE_PROBE)
    if known is None:
        raise CheckpointError(
            f"{folder / MANIFEST_NAME} does not say what base the masks are over: merge again"
        )
    content: Mapping[str, str] = manifest["sources"].get("base", {}).get("content", {})
    found = fingerprint(base)
    # The probe is of the base as the merge read it, whose rows may have followed another vocabulary.
    same = found == content if found.keys() == content.keys() else probe(base) == known
    if not same:
        raise InputError(
            f"{base.source} is not the base that {folder} was merged over: pass that one"
        )


def _check_weights(manifest: Mapping[str, Any], model: Checkpoint, at: str = "") -> None:
    """Raise if a file of weights is not the one that the merge wrote: the masks fit no others."""
    for name, found in fingerprint(model).items():
        if name.endswith(".safetensors"):
            recorded = manifest.get("files", {}).get(f"{at}{name}", {}).get("sha256")
            if found != f"sha256:{recorded}":
                raise CheckpointError(
                    f"{name} of {model.source} is not the file that the merge wrote: merge again"
                )


def _check_shapes(name: str, masks: Checkpoint, unified: Checkpoint, base: Checkpoint) -> None:
    wanted = unified.headers.get(name)
    floating = wanted is not None and wanted.dtype.is_floating_point
    if wanted is None or not floating or masks.headers[name] != packed_header(wanted):
        raise CheckpointError(f"{masks.source}: the mask of '{name}' does not fit the model")
    header = base.headers.get(name)
    if header is None or header.shape != wanted.shape:
        raise InputError(
            f"'{name}' is {None if header is None else list(header.shape)} in {base.source} and "
            f"{list(wanted.shape)} in the merged model: pass the base that was merged over"
        )
