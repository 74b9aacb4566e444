"""From what a user wrote to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from torch import Tensor, nn

from covmerge.base.errors import CheckpointError
from covmerge.base.identifiers import hub_id
from covmerge.files.checkpoints.adapter_reader import adapter_reader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.file_formats import WEIGHT_SUFFIXES
from covmerge.files.checkpoints.folder import FileCheckpoint, open_folder
from covmerge.files.checkpoints.memory import MemoryCheckpoint, open_module
from covmerge.files.checkpoints.remote import RemoteCheckpoint, open_hub
from covmerge.files.stores.address import PAGES, Address, address_of, hub_address
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.remote import remote_store
from covmerge.files.stores.store import Store, child

# The tensors of an adapter, and its configuration.
AdapterPair = tuple[Mapping[str, Tensor], object]
Source = str | Path | Mapping[str, Tensor] | nn.Module | AdapterPair


def open_checkpoint(source: Source) -> Checkpoint:
    """Open a checkpoint: only its headers and its config are read.

    Args:
        source: a folder as transformers saves it, or PEFT (then it is an `AdapterCheckpoint`); one
            `.safetensors`, `.bin`, `.pt`, `.pth` or `.ckpt` file of tensors;
            `"org/name"` or `"org/name@revision"` on the Hugging Face Hub,
            where nothing of that name exists here; the address of a folder or a file of weights,
            `s3://`, `gs://` or `https://`; a state dict; a torch module,
            of which the config is known if it is a model of transformers; or an adapter in memory: a
            PeftModel, or a pair of PEFT's state dict and its configuration.

    Raises:
        CheckpointError: there is no such checkpoint, or it is malformed or unsafe to read.

    Example:
        >>> import torch
        >>> checkpoint = open_checkpoint({"w": torch.arange(6).reshape(3, 2)})
        >>> checkpoint.headers["w"].shape
        (3, 2)
        >>> checkpoint.read("w", range(1, 3))
        tensor([[2, 3],
                [4, 5]])
    """
    if isinstance(source, nn.Module):
        return open_module(source)
    if isinstance(source, Mapping):
        return MemoryCheckpoint(source)
    if isinstance(source, tuple):
        return adapter_reader().open_adapter_memory(*source)
    if (named := hub_address(source)) is not None:
        return adapter_reader().open_adapter_hub(str(source), *named) or open_hub(
            str(source), *named
        )
    if (address := address_of(source)) is not None:
        return open_remote(address)
    try:
        try:
            path = Path(source).expanduser()
        except RuntimeError as error:  # a home folder that nobody has
            raise ValueError(error) from error
        # A RuntimeError of these says that there is no memory for a thread.
        if path.is_dir():
            return open_store(str(source), LocalFolder(path))
        if path.is_file():
            return adapter_reader().open_adapter_file(str(source), path)
        exists = path.exists()
    except (OSError, ValueError) as error:  # ValueError: a NUL
        raise CheckpointError(
            f"{str(source)!r} cannot be opened ({error}): correct the path"
        ) from error
    if exists:
        raise CheckpointError(f"{source} is neither a file nor a folder: pass one of them")
    if not isinstance(source, str) or (named := hub_id(source)) is None:
        raise CheckpointError(
            f"no such file or folder: {source}. Correct the path; a model of the Hugging Face Hub "
            "is written org/name or org/name@revision"
        )
    return adapter_reader().open_adapter_hub(source, *named) or open_hub(source, *named)


def open_remote(address: Address) -> Checkpoint:
    """Open what lies at an address: a file of weights by its suffix, else a folder of a bucket.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    try:
        return _open_remote(address)
    except OSError as error:
        raise CheckpointError(f"{address} cannot be read: {error.strerror}") from error


def _open_remote(address: Address) -> Checkpoint:
    source = str(address)
    parent, _, name = address.path.rpartition("/")
    if parent and name.endswith(WEIGHT_SUFFIXES):
        store = remote_store(replace(address, path=parent))
        file = child(store, unquote(name) if address.scheme in PAGES else name)
        return adapter_reader().open_adapter_file(
            source, file, lambda files: RemoteCheckpoint(files, store, whole=False)
        )
    if address.scheme in PAGES:
        raise CheckpointError(
            f"{address} is no file of weights ({', '.join(WEIGHT_SUFFIXES)}), and a web server lists no "
            "folders: name such a file, or download the folder and pass its path"
        )
    store = remote_store(address)

    def stored_as(files: FileCheckpoint) -> Checkpoint:
        return RemoteCheckpoint(files, store, whole=True)

    adapter = adapter_reader().open_adapter_folder(source, store, stored_as)
    return adapter or stored_as(open_folder(source, store))


def open_store(source: str, store: Store) -> Checkpoint:
    """Open the checkpoint that a store holds, a model or an adapter.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """
    return adapter_reader().open_adapter_folder(source, store) or open_folder(source, store)
