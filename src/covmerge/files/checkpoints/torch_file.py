"""A file of `torch.save` or `pickle.dump`, read as records without running anything that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import cast

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import WeightFile, check_storable, find_header, tensor_name
from covmerge.files.checkpoints.header import current_stamp
from covmerge.files.checkpoints.pickle_bounds import SAVE_AGAIN
from covmerge.files.checkpoints.pickled import load_noted
from covmerge.files.checkpoints.unpickler import Inert, Laid, LaidPart, Sealed, origin_of
from covmerge.files.stores.store import StoredFile

_USUAL = ("state_dict", "model", "module", "model_state_dict")
_OF_TENSORS = "torch._"  # begins the names of torch's functions that build tensors
_State = Mapping[object, object]


class TorchFile(WeightFile):
    """A `.bin`, `.pt`, `.pth` or `.ckpt` file with a state dict, or a training state with one.

    Tensors are read from the file when they are asked for. A file that is no zip archive, as torch
    wrote before 1.6, is held in memory as a whole.
    """

    def __init__(self, file: StoredFile) -> None:
        self.path, where = file.path, str(file)
        stamp = current_stamp(file)
        records, loading = load_noted(self.path)
        laid, unwrapping = _state_dict(records, where)
        self.notes = loading + unwrapping
        self.headers = MappingProxyType(
            {name: TensorHeader(name, one.shape, one.dtype) for name, one in laid.items()}
        )
        for header in self.headers.values():
            check_storable(header, where)
        self._parts = {name: LaidPart(file, stamp, name, one) for name, one in laid.items()}

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._parts:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        return self._parts[name](rows)

    def close(self) -> None:
        """Release the tensors in memory."""
        self._parts = {}


def _state_dict(records: object, where: str) -> tuple[dict[str, Laid], tuple[str, ...]]:
    """Return the dict of tensors: the file's content, or one entry of a training state; and notes."""
    _refuse_code(records, where)
    if not isinstance(records, Mapping):
        raise CheckpointError(
            f"{where} holds a {origin_of(records)}, not a dict of tensors: {SAVE_AGAIN}"
        )
    content, notes = _of_state(cast("_State", records), where)
    for value in content.values():
        _refuse_code(value, where)
    for key, value in content.items():
        if isinstance(value, Inert):
            classes = [arg for arg in (value, *value.args) if isinstance(arg, Inert | Sealed)]
            said = ", ".join(map(origin_of, classes))
            raise CheckpointError(
                f"{where}: {key!r} is no plain dense tensor with values ({said}): convert it first"
            )
        if not isinstance(value, Laid):
            raise CheckpointError(
                f"{where}: {key!r} is a {origin_of(value)}, not a tensor, and no key of it holds a dict of "
                f"tensors only: {SAVE_AGAIN}"
            )
    names = {tensor_name(key, where, f", {SAVE_AGAIN}"): key for key in content}
    return {name: cast("Laid", content[key]) for name, key in names.items()}, notes


def _refuse_code(value: object, where: str) -> None:
    """Raise if a value is one that loading would make by code of another library or of the user."""
    if isinstance(value, Inert) and not origin_of(value).startswith(_OF_TENSORS):
        raise CheckpointError(
            f"{where} holds more than tensors: loading it would run {origin_of(value)}, and code in a "
            "checkpoint is never run. If it is a whole module, save it by torch.save(module.state_dict(), "
            f"FILE) where its code is; if it is a training state, {SAVE_AGAIN}"
        )


def _of_state(content: _State, where: str) -> tuple[_State, tuple[str, ...]]:
    """Return the weights in a training state with a note, or the whole content if it has no weights.

    If there are several dicts of tensors, the one under a usual key has the model's weights. A dict
    under another key counts only if it is the only one.

    Raises:
        CheckpointError: there are several dicts, and no key tells which one has the model's weights.
    """
    if _is_state(content):
        return content, ()
    held = [key for key, value in content.items() if _is_state(value) and value]
    found = [key for key in _USUAL if key in held]
    # Tensors beside a dict of tensors, or another object under a usual key, may be the model's weights.
    plain = not any(isinstance(value, Laid) for value in content.values())
    if plain and not any(isinstance(content.get(key), Mapping) for key in _USUAL):
        found = held
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds several state dicts ({', '.join(map(str, found))}): save the one to merge by "
            "itself"
        )
    if not found:
        return content, ()
    names = cast("_State", content[found[0]])
    rest = {key: value for key, value in content.items() if key != found[0]}
    left = f"; not read: {', '.join(sorted(map(repr, rest)))}" if rest else ""
    note = f"{where}: the tensors are those under '{found[0]}'{left}"
    if other := next(_weights_of(names, rest), None):
        note += (
            f". Other weights of the same names are under '{other}', such as an average: to merge those, "
            "save them by themselves"
        )
    return names, (note,)


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, Laid) for item in cast("_State", value).values()
    )


def _weights_of(names: _State, value: object, depth: int = 3) -> Iterator[str]:
    """Yield the keys, joined by `/`, of other dicts of tensors with the same names."""
    if not isinstance(value, Mapping):
        return
    for key, held in cast("_State", value).items():
        if _is_state(held) and names.keys() <= cast("_State", held).keys():
            yield str(key)
        elif depth > 1:
            yield from (f"{key}/{more}" for more in _weights_of(names, held, depth - 1))
