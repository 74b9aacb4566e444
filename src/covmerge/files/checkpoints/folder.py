"""Checkpoints in files: a folder in Hugging Face's layout, or a single file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted, some
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json, Module, TensorHeader
from covmerge.files.checkpoints.base import (
    CARD_NAME,
    Content,
    Kind,
    Pace,
    WeightFile,
    check_unchanged,
    find_header,
)
from covmerge.files.checkpoints.beside import is_of_training, notes_on_others
from covmerge.files.checkpoints.file_formats import (
    INDEX,
    MODEL_SUFFIXES,
    SAFETENSORS,
    TORCH,
    WEIGHT_SUFFIXES,
    open_divided,
    open_weights,
)
from covmerge.files.checkpoints.hashes import sha256_of
from covmerge.files.checkpoints.header import current_stamp
from covmerge.files.checkpoints.hf_slices import SLICES
from covmerge.files.checkpoints.json_file import as_object, read_object
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.modules import (
    WEIGHTS,
    Folder,
    ModuleWeights,
    module_folders,
    weights_in,
)
from covmerge.files.quantised.gguf_file import GgufSettings, joined, part_names
from covmerge.files.stores.hub_cache import HubModel, cached_model, snapshot_of
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.store import Stamp, Store, StoredFile, child

CONFIG = "config.json"
QUANTISATION = "quantization_config"
_, _QUANTO = _BESIDE = ("hf_quant_config.json", "quanto_qmap.json")  # with quantisation settings
MLX = "quantization"  # MLX's key for it in config.json, beside or instead of the other

_OF_HQQ = ".encoded_state_dict"  # part of a layer, in files that HQQ itself saves; its config says nothing
# Files of which no tensor can be read, what they are, and how to save others.
_UNREAD = {
    re.compile(r"qmodel\.pt"): (
        "HQQ's own modules, nested in a pickle",
        "load it there by AutoHQQHFModel.from_quantized, and pass the folder of its save_to_safetensors",
    ),
    re.compile(r"pytorch_model_fsdp_rank[0-9]+\.bin", re.ASCII): (
        "FSDP's local state of one rank, flat and without names of parameters",
        "load it where it was trained, and pass what fsdp_state_dict_type SHARDED_STATE_DICT saves",
    ),
}

PIPELINE = "model_index.json"  # of a diffusers pipeline: lists its models, each in a folder
STEP = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")  # a step that transformers' Trainer saved
DIFFUSERS = "diffusion_pytorch_model"  # diffusers' name for the files of weights of a part

_CONFIG_VALUES = 200_000  # a quantisation may list every layer; it is parsed some ten times a merge
_ONE = "`hf download NAME FILE` gets one file of a model of the Hub, and prints its path"
_SHARD = re.compile(r"-[0-9]+(?P<kind>-of-(?P<count>[0-9]{1,18})\.[a-z]+)$", re.ASCII)
PREFERRED = (  # the order in which transformers looks for files
    *WEIGHTS,
    f"{DIFFUSERS}.safetensors",
    f"{DIFFUSERS}.safetensors.index.json",
    f"{DIFFUSERS}.bin",
)
_AT_ONCE = 8
_some = partial(some, limit=5, quoted=True)


class FileCheckpoint(Kind):
    """One or several files of weights, and the configs and indices beside them.

    Args:
        source: the source as the user wrote it.
        weights: the opened files of weights; if several have a tensor, the last file's is read.
        store: the store of a whole model; None for a single file.
        beside: index and config.
        notes: how it was opened.
        inner: for each file in a subfolder, the path of that folder in the store.

    Raises:
        CheckpointError: two of its files cannot belong to one model.
    """

    def __init__(
        self,
        source: str,
        weights: Mapping[StoredFile, WeightFile],
        *,
        store: Store | None = None,
        beside: Sequence[StoredFile] = (),
        notes: Sequence[str] = (),
        inner: Mapping[StoredFile, str] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self.folder = None if store is None else store.folder
        self._inner = inner
        self.config: Mapping[str, Any] | None = next(
            (read_config(file) for file in beside if self.path_of(file) == CONFIG), None
        )
        for file in beside:
            if self.path_of(file) in _BESIDE:
                self.config = {**_stated(file), **(self.config or {})}
        packed = [read.settings for read in weights.values() if read.settings is not None]
        if 0 < len(packed) < len(weights):
            raise CheckpointError(
                f"{source} has a GGUF file among {len(weights)} files of weights: pass the one to merge"
            )
        if packed:
            settings = joined(cast("list[GgufSettings]", packed))
            self.config = {**(self.config or {}), QUANTISATION: settings}
        self.notes = (*notes, *(note for read in weights.values() for note in read.notes))
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: header for read in weights.values() for name, header in read.headers.items()}
        )
        if QUANTISATION not in (self.config or {}) and any(
            n.endswith(_OF_HQQ) for n in self.headers
        ):
            self.config = {**(self.config or {}), QUANTISATION: {"quant_method": "hqq"}}
        self.weight_names: Sequence[str] = tuple(map(self.path_of, weights))
        self._weights = dict(weights)
        self._file_of = {name: read for read in weights.values() for name in read.headers}
        self._stamps = {file: current_stamp(file) for file in (*weights, *beside)}

    def path_of(self, file: StoredFile) -> str:
        """Return the path of one of its files inside its folder, with `/` between the parts."""
        folder = self._inner.get(file)
        return f"{folder}/{file.name}" if folder else file.name

    @property
    def stamps(self) -> Mapping[StoredFile, Stamp]:
        """The stamps of all its files, from when they were opened."""
        return MappingProxyType(self._stamps)

    @property
    def hub(self) -> HubModel | None:
        place = self.folder or self._first_path()
        return None if place is None else cached_model(place)

    def readme(self) -> Path | None:
        """Return the path of the model card, or None; a README beside a single file may be unrelated."""
        path = self._first_path()
        places = (self.folder, None if path is None else snapshot_of(path))
        cards = (safe_child(folder, CARD_NAME) for folder in places if folder is not None)
        return next((card for card in cards if card.is_file()), None)

    def companions(self) -> Path | None:
        return self.folder

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        return self._file_of[name].read(name, rows)

    def identity(self) -> dict[str, Json]:
        """Return sizes and times of the files, from when they were opened."""
        names = ("size", "mtime_ns", "ctime_ns")
        files: dict[str, Json] = {
            self.path_of(file): dict(zip(names, stamp, strict=True))
            for file, stamp in self._stamps.items()
        }
        return {"kind": "files", "files": files}

    def contents(self) -> Sequence[Content]:
        """Return all its files; hashing raises if a file has changed since it was opened."""
        return [
            Content(
                self.path_of(file),
                stamp[0],
                partial(self._hash, file),
                early=file not in self._weights,
            )
            for file, stamp in self._stamps.items()
        ]

    def _hash(self, file: StoredFile, pace: Pace) -> str:
        """Return the SHA-256 of a file."""
        with failing_as(f"{file} cannot be read any more"):
            found = sha256_of(file, pace)
        check_unchanged(file, self._stamps[file], current_stamp(file))
        return f"sha256:{found}"

    def close(self) -> None:
        for read in self._weights.values():
            read.close()

    def _first_path(self) -> Path | None:
        first = next(iter(self._stamps))
        return None if first.store.folder is None else first.path


@dataclass
class Modules:
    """The weights that a model has in the folders of its modules."""

    # The opened files of weights.
    weights: dict[StoredFile, WeightFile] = field(default_factory=dict[StoredFile, WeightFile])
    # Indices and configs of modules.
    beside: list[StoredFile] = field(default_factory=list[StoredFile])
    # The folder of each of these files.
    inner: dict[StoredFile, str] = field(default_factory=dict[StoredFile, str])
    notes: list[str] = field(default_factory=list[str])  # remarks about how the files were opened

    def joined(
        self,
        source: str,
        store: Store,
        weights: Mapping[StoredFile, WeightFile],
        beside: Sequence[StoredFile],
        notes: Sequence[str] = (),
    ) -> FileCheckpoint:
        """Return the checkpoint of a model's own files together with its modules' files.

        Raises:
            CheckpointError: one of the model's own tensors has the name of a module's tensor.
        """
        names = {name for read in weights.values() for name in read.headers}
        for file, read in self.weights.items():
            if both := names & read.headers.keys():
                raise CheckpointError(
                    f"{store} holds '{min(both)}' among its own weights, and {file} is to have that name: "
                    "rename the folder of the module, in modules.json too"
                )
        return FileCheckpoint(
            source,
            {**weights, **self.weights},
            store=store,
            beside=[*beside, *self.beside],
            notes=(*notes, *self.notes),
            inner=self.inner,
        )


def holds_weights(names: Collection[str]) -> bool:
    """Return whether a folder's files include an index or a model's file of weights."""
    weights = (name for name in names if name.endswith((INDEX, *WEIGHT_SUFFIXES)))
    return not all(map(is_of_training, weights))


def _holds_model(names: Collection[str]) -> bool:
    """Return whether a folder has a whole model, which is preferred to files of a training's processes."""
    others = (name for name in names if not SLICES.fullmatch(name))
    return any(n in PREFERRED or n.endswith((SAFETENSORS, *MODEL_SUFFIXES)) for n in others)


def choose_weights(names: Collection[str], where: str, folders: Collection[str] = ()) -> str:
    """Return the name of the index or file of weights to read in a folder, chosen as transformers does.

    A single safetensors file with another name is chosen too, unless it is one shard of several, and a
    single GGUF model where nothing else is.

    Raises:
        CheckpointError: there are no weights, or the choice is ambiguous.
    """
    weighty = sorted(name for name in names if name.endswith((*WEIGHT_SUFFIXES, INDEX)))
    models = {_kind(name) or name for name in weighty}
    if len(models) == 1 and weighty[0].endswith(MODEL_SUFFIXES):
        return weighty[0]
    found = [n for n in weighty if n.endswith(SAFETENSORS)]
    for name in PREFERRED:
        if name in names:
            return name
    present = [n for n in found if not n.startswith("adapter_model.")]
    _refuse_slices(present, where)
    _refuse_lone_shard(present or sorted(n for n in names if n.endswith(TORCH)), where)
    if len(present) == 1:
        return present[0]
    if present:
        raise CheckpointError(
            f"{where} holds {len(present)} safetensors files and no {PREFERRED[1]} to say how "
            f"they belong together: {_some(present)}. Pass the one file to merge, or add the index. {_ONE}"
        )
    if PIPELINE in names:
        raise CheckpointError(
            f"{where} is a pipeline of diffusers, of several models ({some(sorted(folders), 10)}): merge "
            f"what was trained, each model by itself, such as {where}/"
            f"{'transformer' if 'transformer' in folders else 'unet'}"
        )
    steps = sorted(int(found[1]) for f in folders if (found := STEP.fullmatch(f)))
    if steps:
        raise CheckpointError(
            f"{where} is the folder of a training run, with {counted(len(steps), 'checkpoint')} and no "
            f"model of its own: pass the last, {where}/checkpoint-{steps[-1]}, or average the last with "
            f"`covmerge merge --run {quote(str(where))} --last {min(5, len(steps))} OUT`"
        )
    others = sorted(n for n in names if n.endswith(WEIGHT_SUFFIXES) and not is_of_training(n))
    for name, (pattern, (what, how)) in product(others, _UNREAD.items()):
        if pattern.fullmatch(name):
            raise CheckpointError(f"{where} holds {name}, {what}: {how}")
    if others:
        raise CheckpointError(
            f"{where} holds {_some(others)}, and no name tells which of them is the model: pass the one "
            f"to merge, or a folder that has it alone. {_ONE}"
        )
    raise CheckpointError(
        f"{where} holds no weights ({', '.join(PREFERRED)}, or one safetensors file): pass the "
        "folder that does, or a file"
    )


def _refuse_slices(present: Sequence[str], where: str) -> None:
    """Refuse files of torch's HuggingFaceStorageWriter, in which each rank has a part of the tensors."""
    slices = [name for name in present if SLICES.fullmatch(name)]
    if slices:
        raise CheckpointError(
            f"{where} holds {counted(len(slices), 'file')} of torch.distributed.checkpoint, such as "
            f"{slices[0]}, with a part of the tensors for each rank. Put them together first: "
            "consolidate_safetensors_files(FOLDER, NEW, fqn_to_index_mapping={name of each tensor: 1}) of "
            "torch.distributed.checkpoint._consolidate_hf_safetensors. Copy config.json and the tokenizer "
            "to NEW, and pass NEW"
        )


def _refuse_lone_shard(present: Sequence[str], where: str) -> None:
    """Refuse files of weights whose names say that they are shards, because no index lists them all."""
    for name in present:
        shard = _SHARD.search(name)
        if shard is not None and int(shard["count"]) > 1:
            raise CheckpointError(
                f"{where} holds {name}, a shard of {int(shard['count'])}, and no index of "
                "them all: the index or shards are missing, fetch them again"
            )


def _check_all_listed(where: str, listed: Collection[str], names: Collection[str]) -> None:
    """Raise if an index omits shards beside it, because it is then of another version than the shards.

    Shards that are listed but missing may have been removed on purpose, together with their layers.
    """
    kinds = {_kind(name) for name in listed} - {None}
    left_out = sorted(name for name in names if name not in listed and _kind(name) in kinds)
    if left_out:
        raise CheckpointError(
            f"{where} lists {counted(len(listed), 'shard')}, and beside it lies {_some(left_out)}, by its "
            "name one of the same model: the index is of another version than the shards. Fetch it again, "
            "or remove what is not of the model"
        )


def _kind(name: str) -> str | None:
    """Return the part that all shards of a model have in common in their names; None: it is no shard."""
    shard = _SHARD.search(name)
    return None if shard is None else name[: shard.start()] + shard["kind"]


def read_config(file: StoredFile | Path) -> dict[str, Any]:
    """Return the content of a config.json, with MLX's quantisation settings under the usual key."""
    config = read_object(file, values=_CONFIG_VALUES)
    mlx = as_object(config.get(MLX))
    if {"bits", "group_size"} <= mlx.keys():
        del config[MLX]
        config.setdefault(QUANTISATION, mlx)
    return config


def _stated(file: StoredFile) -> dict[str, Any]:
    """Return the quantisation settings in a file beside config.json."""
    if file.name == _QUANTO:
        return {QUANTISATION: {"quant_method": "quanto"}}
    settings = as_object(read_object(file, values=_CONFIG_VALUES).get("quantization"))
    packs = settings.get("quant_algo") is not None  # else only the cache is quantised
    return {QUANTISATION: {"quant_method": "modelopt", **settings}} if packs else {}


def weights_stem(config: Mapping[str, Any] | None) -> str:
    """Return the beginning of the names of a model's weight files: diffusers' or the usual one."""
    return DIFFUSERS if config is not None and "_diffusers_version" in config else "model"


def read_weight_map(index: StoredFile | Path) -> dict[str, str]:
    """Return the file name of each tensor, from an index of shards."""
    entries = as_object(read_object(index, values=2 * MAX_TENSORS).get("weight_map"))
    if not entries or not all(isinstance(file, str) for file in entries.values()):
        raise CheckpointError(
            f"{index} has no weight_map from names of tensors to names of files: fetch it again"
        )
    return entries


def check_weight_map(
    where: str, weight_map: Mapping[str, str], held: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """Check that an index and its shards list the same tensors; return notes.

    A file may have an older copy of a tensor that the index places in a file whose name sorts
    later. transformers reads files in this order and uses the last copy. `held` has the names of the
    tensors in each file.

    Raises:
        CheckpointError: a tensor is not in its shard, or a shard has one that is not in the index.
    """
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(
                f"{where} says that '{name}' is in {file}, and it is not: the files are of "
                "different versions, fetch them again"
            )
    older: list[str] = []
    for file, names in held.items():
        stray = [name for name in names if weight_map.get(name, "") < file]
        older += [name for name in names if weight_map.get(name, "") > file]
        if stray:
            raise CheckpointError(
                f"{file} holds {_some(stray)}, which {where} does not place there: the files are of "
                "different versions, fetch them again"
            )
    if not older:
        return ()
    files = sorted({weight_map[name] for name in older})
    return (
        f"{where} places {_some(older)} in {some(files)}, and the copies in other files were not read",
    )


def open_folder(source: str, store: Store) -> FileCheckpoint:
    """Open a model folder."""
    where = str(store)
    with failing_as(f"{where} cannot be listed"):
        names = set(store.names())
    beside = [_existing(store, name) for name in (CONFIG, *_BESIDE) if name in names]
    files = None if _holds_model(names) else open_divided(store, names)
    if files is not None:
        first, *others = files.files
        divided = FileCheckpoint(source, {first: files}, store=store, beside=[*others, *beside])
        divided.divided = True
        return divided
    modules = open_modules(store, names)
    if modules.weights and not holds_weights(names):
        return modules.joined(source, store, {}, beside)
    choice = choose_weights(names, where, store.folders())
    notes: tuple[str, ...] = ()
    chosen = _existing(store, choice)
    if choice.endswith(INDEX):
        beside.append(chosen)
        weights, notes = _open_shards(chosen, names)
    else:
        weights = _open_whole(chosen)
    found = modules.joined(source, store, weights, beside, notes)
    others = _others(names, {choice, *found.weight_names})
    found.notes += tuple(notes_on_others(store, choice, others, found.headers))
    return found


def open_modules(store: Store, names: Collection[str]) -> Modules:
    """Open the weights that a sentence-transformers model has in the folders of its modules.

    Raises:
        CheckpointError: a module has weights that cannot be read, or lies outside the folder.
    """
    found = Modules()
    with failing_as(f"{store} cannot be listed"):
        modules = list(_module_weights(store, names))
    for folder, file in modules:
        beside = [file] if file.name.endswith(INDEX) else []
        weights, notes = _open_shards(file, folder.names) if beside else (_open_all([file]), ())
        config = _existing(folder.store, CONFIG) if CONFIG in folder.names else None
        module = Module(folder.path, None if config is None else read_config(config))
        beside += [] if config is None else [config]
        found.weights |= {shard: ModuleWeights(read, module) for shard, read in weights.items()}
        found.beside += beside
        found.inner |= dict.fromkeys((*weights, *beside), folder.path)
        others = _others(folder.names, {file.name, *(shard.name for shard in weights)})
        found.notes += notes
        if others:
            found.notes.append(f"{file} was read, and not {some(sorted(others), 12)}")
    return found


def _module_weights(store: Store, names: Collection[str]) -> Iterator[tuple[Folder, StoredFile]]:
    """Yield the folders of modules that have weights, each with its file of weights or index."""
    for folder in module_folders(store, names):
        if (file := weights_in(store, folder)) is not None:
            yield folder, file


def module_files(store: Store, names: Collection[str]) -> list[str]:
    """Return the paths, in a model's folder, of the files of weights of its modules."""
    paths: list[str] = []
    for folder, file in _module_weights(store, names):
        files = [file.name]
        if file.name.endswith(INDEX):
            files += sorted(set(read_weight_map(file).values()))
        paths += [f"{folder.path}/{name}" for name in files]
    return paths


def _open_shards(
    index: StoredFile, names: Collection[str]
) -> tuple[dict[StoredFile, WeightFile], tuple[str, ...]]:
    """Open the shards that an index lists; `names` are the files in its folder. Return them with notes."""
    weight_map = read_weight_map(index)
    _check_all_listed(str(index), set(weight_map.values()), names)
    files = sorted(set(weight_map.values()))
    weights = _open_all([_existing(index.store, name) for name in files])
    held = {file.name: read.headers for file, read in weights.items()}
    return weights, check_weight_map(str(index), weight_map, held)


def _others(names: Collection[str], read: Collection[str]) -> list[str]:
    """Return files of weights that are not read, except the model's own weights in an older format."""
    older = ("pytorch_model", DIFFUSERS)
    return [
        name
        for name in names
        if name not in read
        and (
            name.endswith(SAFETENSORS)
            or name == PREFERRED[1]
            or (name.endswith(TORCH) and not name.startswith(older))
        )
    ]


def open_file(source: str, file: StoredFile) -> FileCheckpoint:
    """Open a single file of weights."""
    return FileCheckpoint(source, _open_whole(file))


def _open_whole(file: StoredFile) -> dict[StoredFile, WeightFile]:
    """Open a file of weights, and the other parts of its model if it is one of several."""
    names = part_names(file.name)
    found = _open_all([file] if len(names) == 1 else [_existing(file.store, n) for n in names])
    # A module of sentence-transformers may have a file without tensors, but a model may not.
    if file.suffix in TORCH and not any(read.headers for read in found.values()):
        raise CheckpointError(f"{file} holds a dict without tensors: is it the right file?")
    return found


def _open_all(files: Iterable[StoredFile]) -> dict[StoredFile, WeightFile]:
    found = list(files)
    if len(found) == 1:  # no other file to read at the same time
        return {found[0]: open_weights(found[0])}
    with ThreadPool(_AT_ONCE) as pool:  # remote files are slow to open
        return dict(zip(found, pool.map(open_weights, found), strict=True))


def _existing(store: Store, name: str) -> StoredFile:
    file = child(store, name)
    if not store.is_file(name):
        raise CheckpointError(
            f"{file} is missing or no regular file: the download was probably cut short, fetch it "
            "again"
        )
    return file
