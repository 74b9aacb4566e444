"""The file formats of weights: one row for each format, with what identifies it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import WeightFile
from covmerge.files.checkpoints.distributed import open_distributed
from covmerge.files.checkpoints.fsdp_ranks import open_ranks
from covmerge.files.checkpoints.header import SafetensorsFile
from covmerge.files.checkpoints.hf_slices import open_slices
from covmerge.files.checkpoints.pieces import PiecedFiles
from covmerge.files.checkpoints.torch_file import TorchFile
from covmerge.files.checkpoints.zero import open_zero
from covmerge.files.quantised.gguf_file import GGUF, GgufFile
from covmerge.files.stores.store import Store, StoredFile

SAFETENSORS = ".safetensors"
TORCH = (".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"  # of a model in several files


@dataclass(frozen=True)
class FileFormat:
    """A format of files with whole tensors."""

    suffixes: tuple[str, ...]
    open: Callable[[StoredFile], WeightFile]
    is_model: bool = False  # whether one such file is a whole model, if it is alone in its folder


FILE_FORMATS = (
    FileFormat((SAFETENSORS,), SafetensorsFile),
    FileFormat(TORCH, TorchFile),
    FileFormat((GGUF,), GgufFile, is_model=True),
)
# Functions that open the files of a training's processes in a folder; None: it has none of that format.
_DIVIDED = (open_slices, open_distributed, open_ranks, open_zero)
WEIGHT_SUFFIXES = tuple(suffix for kind in FILE_FORMATS for suffix in kind.suffixes)
MODEL_SUFFIXES = tuple(s for kind in FILE_FORMATS if kind.is_model for s in kind.suffixes)


def open_weights(file: StoredFile) -> WeightFile:
    """Open a file of weights by its suffix."""
    for kind in FILE_FORMATS:
        if file.suffix in kind.suffixes:
            return kind.open(file)
    hint = "its folder" if file.name.endswith(INDEX) else "a folder or one of these"
    raise CheckpointError(
        f"{file} is not a file of weights that covmerge reads "
        f"({', '.join(WEIGHT_SUFFIXES)}): pass {hint}"
    )


def open_divided(store: Store, names: Collection[str]) -> PiecedFiles | None:
    """Open the files that the processes of a training left in a folder, or return None."""
    found = (open_in(store, names) for open_in in _DIVIDED)
    return next((files for files in found if files is not None), None)
