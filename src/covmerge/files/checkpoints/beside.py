"""Other files of weights beside a model's own: they are refused if the output would need them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted, some
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.names import looks_like_adapter
from covmerge.files.checkpoints.file_formats import open_weights
from covmerge.files.stores.store import Store, StoredFile

# Files that training leaves and no model needs, and adapters, which are opened elsewhere.
_KNOWN = re.compile(
    r"adapter_model\..*|"
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args|trainer_state)\b.*"
    r"|(optimizer|rng_state|random_states)_.*"
)


def is_of_training(name: str) -> bool:
    """Return whether a file's name is that of an adapter or of training state, such as an optimiser's.

    Example:
        >>> is_of_training("optimizer.pt"), is_of_training("model.pt")
        (True, False)
    """
    return _KNOWN.fullmatch(name) is not None


def notes_on_others(
    store: Store, chosen: str, others: Collection[str], headers: Mapping[str, TensorHeader]
) -> Iterator[str]:
    """Yield a note on the files of weights that are not read beside the chosen ones.

    Raises:
        CheckpointError: one of them has other tensors of the same model. Files on the Hub are not
            fetched to check this.
    """
    for name in sorted(others):
        if store.folder is not None and not is_of_training(name):
            _check_no_part(store, name, headers)
    if others:
        yield f"{store}: {chosen} was read, and not {some(sorted(others), 12)}"


def _check_no_part(store: Store, name: str, headers: Mapping[str, TensorHeader]) -> None:
    try:
        read = open_weights(StoredFile(store, name))
    except CheckpointError:
        return  # no tensors that covmerge reads
    names = set(read.headers)
    read.close()
    # A copy in another precision has the same names; a copy with its authors' names has other modules.
    if names & headers.keys() or not _modules(names) & _modules(headers):
        return
    # An adapter is merged separately. Scales and directions of activations are named like modules.
    if looks_like_adapter(names) or names <= modules_of(headers):
        return
    raise CheckpointError(
        f"{store}: {name} holds {counted(len(names), 'tensor')} of the model that its other files lack "
        f"({some(sorted(names), 3, quoted=True)}), and the output would lack them. Merge that file by "
        "itself (pass the files in place of the folders), and the rest after it was moved out of the folder"
    )


def modules_of(names: Collection[str]) -> set[str]:
    """Return the names of the modules that contain the tensors, at every depth.

    Example:
        >>> sorted(modules_of(["h.0.weight"]))
        ['h', 'h.0']
    """
    parts = (name.split(".") for name in names)
    return {".".join(path[:deep]) for path in parts for deep in range(1, len(path))}


def _modules(names: Collection[str]) -> set[str]:
    """Return the outermost modules of tensors."""
    return {outer for name in names if (outer := name.partition(".")[0]) != name}
