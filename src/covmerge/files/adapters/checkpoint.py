"""Adapters: the updates of a base's tensors, and the tensors that were trained whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Container, Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import counted, some
from covmerge.base.types import LowRank, TensorHeader
from covmerge.files.adapters.config import AdapterConfig
from covmerge.files.adapters.folds import Folded, Folds, computed_in
from covmerge.files.adapters.gguf import gguf_adapter, gguf_factors, named_by_base
from covmerge.files.adapters.layout import ADAPTER_NAME, DIFFUSERS_FORM, KOHYA_FORM, LORA_NAME
from covmerge.files.adapters.names import (
    Contents,
    Stacked,
    Update,
    looks_like_adapter,
    oriented,
    read_names,
    saved_names,
)
from covmerge.files.adapters.other_libraries import (
    ADAPTERHUB_NAMES,
    HEAD_NAMES,
    MLX_NAME,
    adapterhub_factors,
    adapterhub_fields,
    is_full_mlx,
    is_of_adapterhub,
    mlx_factors,
    mlx_fields,
)
from covmerge.files.adapters.parameters import find_parameters
from covmerge.files.adapters.parts import updates_of_base
from covmerge.files.checkpoints.base import (
    PEFT_FORM,
    Checkpoint,
    FactorHeader,
    LoraForm,
    find_header,
)
from covmerge.files.checkpoints.conversions import converted
from covmerge.files.checkpoints.file_formats import open_weights
from covmerge.files.checkpoints.folder import (
    CONFIG,
    DIFFUSERS,
    FileCheckpoint,
    module_files,
    open_file,
    open_modules,
)
from covmerge.files.checkpoints.header import SafetensorsFile
from covmerge.files.checkpoints.json_file import parse_object, read_object
from covmerge.files.checkpoints.memory import MemoryCheckpoint
from covmerge.files.checkpoints.pieces import Assembled, Assembly, Read, StoredTensor
from covmerge.files.checkpoints.remote import HubCheckpoint
from covmerge.files.checkpoints.view import View
from covmerge.files.stores.hub import HubStore, cached_snapshot, is_offline
from covmerge.files.stores.local import LocalFolder, local_file
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.store import Store, StoredFile, child

ADAPTER_CONFIG = "adapter_config.json"

_WEIGHTS = (ADAPTER_NAME, "adapter_model.bin")  # in the order of PEFT
_FILES = (*_WEIGHTS, MLX_NAME, *ADAPTERHUB_NAMES)
_MAX_VALUES = 100_000  # of a configuration; it may list thousands of modules
_LOST_BIASES = (
    "{} was trained with bias = lora_only and stores no bias: PEFT 0.8 to 0.20 did not save them. Where "
    "its layers have none, nothing is missing; otherwise save the trained model again with peft 0.21.2"
)
_LOST_LORA_BIASES = (
    "{} has lora_bias = true in its adapter_config.json and stores no lora_B.bias: as PEFT does, "
    "these were taken as zero. If they were trained, fetch the file again"
)
_MODEL = ("model.safetensors", "pytorch_model.bin", DIFFUSERS)


# A function that turns an opened file into the checkpoint to read.
StoredAs = Callable[[FileCheckpoint], Checkpoint]


class AdapterCheckpoint(View):
    """An adapter: `low_rank` has the updates of its base, `headers` the tensors that it replaces.

    A tensor that is both replaced and updated is only in `headers`. It is read with its update added.

    Args:
        stored: the file of weights.
        contents: the meaning of its tensors.
        config: the configuration; None: the file has no configuration.
        notes: remarks about how it was opened.
        folds: the layers whose update is not a product of stored factors; None: the base is not known.
    """

    def __init__(
        self,
        stored: Checkpoint,
        contents: Contents,
        config: AdapterConfig | None,
        notes: tuple[str, ...] = (),
        folds: Folds | None = None,
    ) -> None:
        super().__init__(stored, None, *notes)
        self.is_adapter = True
        self.form: LoraForm = PEFT_FORM if config is not None else _form_of(stored.headers)
        self.folds = folds or Folds(stored, contents.folded, contents.replaced)
        self.adapter_config: Mapping[str, Any] = MappingProxyType(
            dict(config.fields) if config else {}
        )
        self.base_model = config.base_model if config else None
        self._contents = contents
        self._config = config
        self._notes = notes
        updates = {
            name: _header(update)
            for name, update in contents.updates.items()
            if name not in contents.replaced
        }
        # No base has these names, so the merge reports them as missing.
        unknown = {
            name: FactorHeader(name, factors.shape, factors.terms, factors.dtype, factors.numel)
            for name, factors in contents.wrapped.items()
        }
        unknown |= {
            name: FactorHeader(name, layer.shape or (0, 0), 0, layer.dtype, layer.elements)
            for name, layer in self.folds.missing.items()
        }
        made = {
            name: FactorHeader(name, shape, rank, dtype, rank * sum(shape))
            for name, (rank, shape, dtype) in self.folds.ranks.items()
        }
        self.low_rank: Mapping[str, FactorHeader] = MappingProxyType(updates | unknown | made)
        self.replaced: Collection[str] = contents.replaced.keys() - self.folds.headers.keys()
        # Each matrix of a stack has columns of the whole factor; a layer of experts has two stacks.
        self._read_whole = lru_cache(maxsize=2)(stored.read)
        # Tensors of which the adapter changes only parts (`rejoined`), and the base that has these
        # parts.
        self._joined: Mapping[str, Callable[[range | None], Tensor]] = {}
        self._under: Checkpoint | None = None
        self.headers = MappingProxyType(
            {name: self._replaced_header(name) for name in contents.replaced} | self.folds.headers
        )

    def written_as(self, name: str) -> str:
        """Return the name that the adapter's file has for a tensor of the base."""
        update = self._contents.updates.get(name) or self._contents.folded.get(name)
        return (update and update.written) or name

    def own_name(self, name: str) -> str:
        """Return the name in the part of the base that the adapter was made on."""
        return self._contents.own.get(name, name)

    def keeps_ties(self, name: str) -> bool:
        """Return whether tensors tied to this changed tensor stay tied to it as its library loads them."""
        layer = self._contents.folded.get(name)
        of_all = self._config is not None and self._config.keeps_ties
        return of_all or (layer is not None and layer.kind.keeps_ties)

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Return the new value of a replaced tensor, not its difference from the base."""
        header = find_header(self.headers, name, rows, self.source)
        if name in self._joined:
            return self._joined[name](rows)
        if name in self.folds.headers:
            return self.folds.read(name, rows)
        value = self._stored.read(self._contents.replaced[name], rows)
        if name not in self._contents.updates:
            return value
        factors = self._factors(self._contents.updates[name])
        left = factors.left if rows is None else factors.left[rows.start : rows.stop]
        return value.to(header.dtype) + (left @ factors.right).to(header.dtype).view(value.shape)

    def read_factors(self, name: str) -> LowRank:
        """Return the factors of an update: `left @ right` has the shape of `low_rank[name]`.

        All scales are in `left`. The dtype is float32, or float64 if the factors are stored so.

        Raises:
            CheckpointError: there is no such update, the update is that of a stack of matrices, or
                the source changed or ended early.
        """
        found = self.read_update(name)
        if isinstance(found, tuple):
            raise CheckpointError(
                f"{self.source} adapts '{name}', a stack of {len(found)} matrices, by factors of "
                "each: they are read by read_update"
            )
        return found

    def held(self, name: str, elements: int) -> int:
        if name in self._joined:
            return 4 * math.prod(self.headers[name].shape)
        return self.folds.held(name, elements) if name in self.folds.headers else elements

    def read_update(self, name: str, rows: range | None = None) -> LowRank | tuple[LowRank, ...]:
        if name in self.folds.ranks:
            return _rows(self.folds.factors(name), rows)
        update = self._update(name)
        stack = update.stack
        if stack is None:
            return _rows(self._factors(update), rows)
        if stack.index is not None:
            matrix = self._matrix(update, stack, stack.index)
            return _rows(_rows(matrix, stack.rows), rows)
        matrices = range(stack.count) if rows is None else rows
        return tuple(self._matrix(update, stack, index) for index in matrices)

    def named_as(
        self,
        base: Mapping[str, TensorHeader],
        conv1d: Container[str] | None = None,
        of_base: Mapping[str, Any] | None = None,
        folders: Collection[str] = (),
    ) -> AdapterCheckpoint:
        """Return this adapter with the names and orientations of the base's tensors.

        Args:
            base: headers of the base.
            conv1d: names of the base's layers that are stored as `(d_in, d_out)`, as PEFT
                determines it; None: they are unknown, so that the adapter's `fan_in_fan_out`
                decides.
            of_base: the base's configuration; it tells which rows are in llama.cpp's order.
            folders: names of the base's folders, one of which may say what part of a pipeline it is.

        Three kinds of adapters need the names. PEFT does not store which of a module's parameters
        its factors belong to, nor how the factors of a stack of matrices are ordered
        (`find_parameters` finds out). A file without `adapter_config.json` has other names: Kohya's
        scripts write `_` for every `.`, and diffusers begins names with the part of the pipeline.
        GGUF has its own names. A part of a pipeline that the base does not have is left out, with a
        note.

        Raises:
            CheckpointError: the base has no tensor for an update, or several.
        """
        if self._config is not None:
            contents = self._unwrapped(base, self._config)
            updates = contents.updates
            if (architecture := self._config.architecture) is not None:
                updates = named_by_base(updates, base, of_base or {}, architecture, self.source)
            if conv1d is not None:
                updates = {name: oriented(update, conv1d) for name, update in updates.items()}
            return self._in_pieces(replace(contents, updates=updates), base, of_base)
        changes = (*self._contents.updates.values(), *self._contents.folded.values())
        found, missing = updates_of_base(changes, base, self.source, folders)
        updates = {n: update for n, update in found.items() if isinstance(update, Update)}
        folded = {n: layer for n, layer in found.items() if isinstance(layer, Folded)}
        notes = [
            f"{self.source}: {count} updates of {part} are of another base, and were left aside"
            for part, count in missing.items()
        ]
        own = {change.name for change in changes}
        of_authors = [name for name, one in found.items() if one.written not in own]
        if of_authors:
            notes.append(
                f"{self.source}: {counted(len(of_authors), 'update')}, such as that of '{of_authors[0]}', "
                "are under the names of the model's authors, and were read as diffusers reads such files"
            )
        named = self._with(Contents(updates, self._contents.replaced, folded=folded), *notes)
        # The authors' fused layers are divided, so their own form has no names for these updates.
        named.form = DIFFUSERS_FORM if of_authors else self.form
        return named

    def on_part(self, names: Mapping[str, str], root: str, note: str) -> AdapterCheckpoint:
        """Return this adapter, which was made on a part of the base, with the base's names.

        `names` has these by the adapter's, and `root` begins the names of the part.
        """
        return self._with(self._contents.renamed(names, root), note)

    def over(
        self, base: Checkpoint, names: Mapping[str, str], conv1d: Container[str] | None
    ) -> AdapterCheckpoint:
        """Return this adapter bound to its base, whose weights some types need to compute their own.

        `names` has the base's tensor names, by the adapter's; for `conv1d` see `named_as`.
        """
        if not self._contents.folded:
            return self
        held = self._contents
        folds = Folds(self._stored, held.folded, held.replaced, base, names, conv1d)
        return self._with(held, *folds.notes, folds=folds)

    def rejoined(
        self, base: Checkpoint, names: Mapping[str, str], made: Mapping[str, Assembly]
    ) -> AdapterCheckpoint:
        """Return this adapter with each tensor that it changes in part made whole, as in the base's files.

        Args:
            base: the checkpoint that has the parts, under its own names.
            names: this adapter's names, by the base's.
            made: by the name in the base's files, how the tensor is made of parts.
        """
        held = {
            part: names[part] for one in made.values() for part in one.stored() if part in names
        }
        of_parts = [base.headers[part].dtype for part in held]
        of_parts += [(self.low_rank.get(n) or self.headers[n]).dtype for n in held.values()]
        dtype = computed_in(*of_parts)

        def read(part: str, rows: range) -> Tensor:
            name = held.get(part)
            if name is not None and name in self.headers:
                return self.read(name, rows).to(dtype)
            value = base.read(part, rows).to(dtype)
            if name is None:
                return value
            factors = _rows(self.read_factors(name), rows)
            return value + (factors.left @ factors.right).to(dtype).view(value.shape)

        found = copy(self)
        found._joined = {name: partial(_joined, one, read) for name, one in made.items()}
        found._under = base
        taken = {*held.values()}
        found.low_rank = MappingProxyType(
            {name: header for name, header in self.low_rank.items() if name not in taken}
        )
        found.headers = MappingProxyType(
            {name: header for name, header in self.headers.items() if name not in taken}
            | {name: TensorHeader(name, one.shape, dtype) for name, one in made.items()}
        )
        name, one = next(iter(made.items()))
        part = next(names[part] for part in one.stored() if part in names)
        found.notes = (
            *self.notes,
            f"{self.source} changes {counted(len(made), 'tensor')} of the base under other names or in "
            f"parts, such as '{part}' in '{name}': these are merged whole",
        )
        return found

    def materialize(self) -> None:
        """Fetch the adapter's weights, and the base's if an update is computed from them."""
        super().materialize()
        self.folds.materialize()
        if self._under is not None:
            self._under.materialize()

    def _replaced_header(self, name: str) -> TensorHeader:
        stored = self._stored.headers[self._contents.replaced[name]]
        update = self._contents.updates.get(name)
        if update is None:
            return replace(stored, name=name)
        rows = stored.shape[0] if stored.shape else 0
        if update.shape != (rows, math.prod(stored.shape[1:])):
            raise CheckpointError(
                f"{self.source}: '{stored.name}' is of shape {list(stored.shape)}, and its update "
                f"of shape {list(update.shape)}: the adapter is damaged, fetch it again"
            )
        return TensorHeader(name, stored.shape, computed_in(stored.dtype, update.dtype))

    def _with(
        self,
        contents: Contents,
        *notes: str,
        stored: Checkpoint | None = None,
        folds: Folds | None = None,
    ) -> AdapterCheckpoint:
        """Return this adapter with other contents, and with more notes."""
        of, more = stored or self._stored, (*self._notes, *notes)
        return AdapterCheckpoint(of, contents, self._config, more, folds)

    def _unwrapped(self, base: Mapping[str, TensorHeader], config: AdapterConfig) -> Contents:
        contents = self._contents
        root = contents.root
        part = {n.removeprefix(root): h for n, h in base.items() if n.startswith(root)}
        updates, wrapped = find_parameters(contents.wrapped, part, config)
        if twice := updates.keys() & contents.replaced.keys():
            raise CheckpointError(
                f"{self.source} holds '{min(twice)}' whole, and factors for it: the adapter is "
                "damaged, fetch it again"
            )
        return replace(contents, updates={**contents.updates, **updates}, wrapped=wrapped)

    def _in_pieces(
        self,
        contents: Contents,
        base: Mapping[str, TensorHeader],
        of_base: Mapping[str, Any] | None,
    ) -> AdapterCheckpoint:
        """Split whole trained tensors as in the base's files; transformers joins some in memory."""
        replaced, headers = contents.replaced, self._stored.headers
        shapes = {name: headers[stored].shape for name, stored in replaced.items()}
        found, by = converted(
            shapes, {name: header.shape for name, header in base.items()}, of_base
        )
        made = {name: one for name, one in found.items() if not isinstance(one, StoredTensor)}
        if not made:
            return self._with(contents)
        whole = {*replaced.values()}
        others = [name for name in headers if name not in whole]
        name = next(iter(made))
        note = (
            f"{self.source}: {counted(len(made), 'tensor')}, such as '{name}', are parts of what it holds "
            f"whole, as '{next(iter(made[name].stored()))}' ({by})"
        )
        pieces = Assembled(View(self._stored, {n: n for n in others} | dict(replaced)), made)
        held = {name: name for name in pieces.headers if name not in headers or name in replaced}
        return self._with(replace(contents, replaced=held), note, stored=pieces)

    def _update(self, name: str) -> Update:
        if name in self._contents.wrapped or name in self.folds.missing:
            raise CheckpointError(
                f"{self.source}: what the tensors of '{name}' are to it, only the base tells: pass the "
                "adapter together with its base"
            )
        if name not in self.low_rank:
            raise CheckpointError(
                f"{self.source} has no update of '{name}': its names are those of low_rank"
            )
        return self._contents.updates[name]

    def _matrix(self, update: Update, stack: Stacked, index: int) -> LowRank:
        """Read the factors of one matrix of a stack."""
        assert update.down is not None
        dtype = computed_in(update.dtype)
        first = index * update.rank
        down = self._stored.read(update.down, range(first, first + update.rank)).to(dtype)
        columns = slice(index, None, stack.count)
        if stack.by_expert:
            columns = slice(first, first + update.rank)
        up = self._read_whole(update.up)[:, columns].to(dtype)
        return _product(up, down, update)

    def _factors(self, update: Update) -> LowRank:
        dtype = computed_in(update.dtype)
        scale = update.scale
        if update.alpha is not None:
            scale *= self._number(update.alpha)
        if update.divisor is not None:
            scale /= self._number(update.divisor) + 1e-5
        up = self._stored.read(update.up).to(dtype)
        up = up if update.order is None else up[torch.tensor(update.order)]
        if update.down is None:
            return LowRank(up.view(-1, 1) * scale, torch.ones(1, 1, dtype=dtype))
        up = up.reshape(up.shape[0], update.rank)
        down = self._stored.read(update.down).to(dtype)
        down = down.reshape(update.rank, -1) if update.rank else down
        if update.middle is not None:
            down = down * self._stored.read(update.middle).to(dtype).view(-1, 1)
        return _product(up, down, replace(update, scale=scale))

    def _number(self, name: str) -> float:
        number = float(self._stored.read(name).double())
        if not math.isfinite(number):
            raise CheckpointError(
                f"{self.source}: '{name}' is {number}, and a scale is finite: fetch the file again, "
                "or train it again"
            )
        return number


def _header(update: Update) -> FactorHeader:
    return FactorHeader(
        name=update.name,
        shape=update.shape,
        rank=update.rank,
        dtype=update.dtype,
        elements=update.stack.held if update.stack else update.rank * sum(update.shape),
        transposed=update.transposed,
        table=update.table,
        stacked=update.stack is not None,
    )


def _product(up: Tensor, down: Tensor, update: Update) -> LowRank:
    """Return the factors in the orientation of the base's tensor, with the scale in the left one."""
    left, right = (down.T, up.T) if update.transposed else (up, down)
    left, right = left.contiguous(), right.contiguous()
    # Every merged adapter has the scale 1, and multiplying takes longer than reading.
    return LowRank(left if update.scale == 1 else left * update.scale, right)


def _joined(made: Assembly, read: Read, rows: range | None) -> Tensor:
    return made.read(read, range(made.shape[0]) if rows is None else rows).contiguous()


def _rows(factors: LowRank, rows: range | None) -> LowRank:
    if rows is None:
        return factors
    return LowRank(factors.left[rows.start : rows.stop], factors.right)


def as_stored(files: FileCheckpoint) -> Checkpoint:
    """Return the files unchanged."""
    return files


def open_adapter_folder(
    source: str, store: Store, stored_as: StoredAs = as_stored
) -> Checkpoint | None:
    """Open an adapter of PEFT, mlx-lm, diffusers or AdapterHub in a folder; None if the folder has none.

    A model beside the adapter has precedence.

    Raises:
        CheckpointError: the adapter is damaged or its kind is not read, or there are several to
            choose from.
    """
    with failing_as(f"{store} cannot be listed"):
        names, folders = set(store.names()), store.folders()
    inside = sorted(name for name in folders if store.inside(name).is_file(ADAPTER_CONFIG))
    if holds_adapter(names):
        unread = f"{store}: the adapters {', '.join(inside)} in it were not read"
        return _open(source, store, names, (unread,) if inside else (), stored_as)
    if LORA_NAME in names and not any(name.startswith(_MODEL) for name in names):
        return open_adapter_file(source, child(store, LORA_NAME), stored_as)
    if not inside or any(name.endswith((".safetensors", ".bin")) for name in names):
        return None
    raise CheckpointError(
        f"{store} holds adapters in folders of their own: {', '.join(inside)}. Pass one of them, "
        f"such as {store.inside(inside[0])}"
    )


def open_adapter_file(
    source: str, given: Path | StoredFile, stored_as: StoredAs = as_stored
) -> Checkpoint:
    """Open one file of weights, as an adapter if its tensors have names of PEFT, diffusers or Kohya."""
    file = local_file(given)
    configured = file.name in _FILES and file.store.is_file(ADAPTER_CONFIG)
    if configured or file.name in _WEIGHTS:
        beside = (ADAPTER_CONFIG,) if configured else ()
        return _open(source, file.store, (file.name, *beside), stored_as=stored_as)
    stored = stored_as(open_file(source, file))
    if (settings := gguf_adapter(stored)) is not None:
        factors, config = gguf_factors(stored, settings)
        return AdapterCheckpoint(factors, read_names(factors.headers, config, source), config)
    if not looks_like_adapter(stored.headers):
        return stored
    alpha = next((name for name in stored.headers if name.endswith(".alpha")), None)
    of_parts = _configs_of_parts(file)
    if alpha is not None and of_parts:
        raise CheckpointError(
            f"{file} has '{alpha}', and lora_alpha in its metadata (lora_adapter_metadata), which may say "
            "otherwise: save a copy without one of them"
        )
    notes: tuple[str, ...] = ()
    if alpha is None and not of_parts:
        notes = (
            f"{file} says nothing of its scale (no {ADAPTER_CONFIG}, no alpha), which was taken as 1",
        )
    contents = read_names(stored.headers, None, source, of_parts)
    return AdapterCheckpoint(stored, contents, None, notes)


def open_adapter_memory(
    tensors: Mapping[str, Tensor], config: object, under: Mapping[str, Tensor] | None = None
) -> AdapterCheckpoint:
    """Open an adapter that PEFT has in memory, as if PEFT had saved and covmerge read it.

    Args:
        tensors: what `get_peft_model_state_dict` returns.
        config: a `PeftConfig`, a mapping with the fields of adapter_config.json, or the
            `peft_config` of a model with one adapter.
        under: some weights of the model that has the adapter, by their names in that model.
    """
    given: Any = config
    if isinstance(given, Mapping) and "peft_type" not in given:
        named = cast("Mapping[str, Any]", given)
        if len(named) != 1:
            raise CheckpointError(
                f"the adapter in memory comes with the configurations of {some(list(named))}: pass that of "
                "its own, model.peft_config[NAME]"
            )
        (given,) = named.values()
    settings: Any = cast("Any", given) if isinstance(given, Mapping) else given.to_dict()
    # PEFT's own file has lists for sets, and sorted keys.
    fields = json.loads(json.dumps(settings, default=list, sort_keys=True))
    stored = MemoryCheckpoint(tensors, settings=fields, under=under)
    return _as_adapter(stored, AdapterConfig(stored.source, fields), "the adapter in memory")


def open_adapter_hub(source: str, name: str, revision: str | None) -> AdapterCheckpoint | None:
    """Open a repository of the Hub that holds an adapter and no model; return None for any other.

    The adapter is downloaded, because it is small and its configuration says more than its headers.
    """
    if is_offline(source):
        folder = cached_snapshot(source, name, revision)
        store = HubStore(source, name, folder.name, {})
        names: Collection[str] = {path.name for path in folder.iterdir()}
        if not holds_adapter(names):
            return None
    else:
        store = HubStore.find(source, name, revision)
        names = store.names()
        if not holds_adapter(names):
            return None
        weights = [file for file in _FILES if file in names][:1]
        folder = store.download((*store.companions(), *weights, *module_files(store, names)))
    return _open(source, LocalFolder(folder), names, stored_as=partial(HubCheckpoint, store))


def holds_adapter(names: Collection[str]) -> bool:
    """Return whether a folder's files include an adapter and no model.

    Example:
        >>> holds_adapter(["adapter_config.json", "adapter_model.safetensors"])
        True
        >>> holds_adapter(["adapter_config.json", "model.safetensors"])
        False
    """
    model = any(name.startswith(_MODEL) for name in names)
    return not model and any(name in names for name in (ADAPTER_CONFIG, *_WEIGHTS))


def _open(
    source: str,
    store: Store,
    names: Collection[str],
    notes: tuple[str, ...] = (),
    stored_as: StoredAs = as_stored,
) -> AdapterCheckpoint:
    """Open the adapter of a folder; check its configuration first, which decides whether it can be read."""
    weights = next((name for name in _FILES if name in names), None)
    if ADAPTER_CONFIG not in names:
        raise CheckpointError(
            f"{store} has {weights} and no {ADAPTER_CONFIG}, which says by how much its updates are "
            "multiplied (lora_alpha): fetch that too. If it is lost and the factor is 1, pass the file "
            "under another name"
        )
    fields = read_object(child(store, ADAPTER_CONFIG), _MAX_VALUES)
    of_mlx, of_adapterhub = weights == MLX_NAME, is_of_adapterhub(fields)
    if of_adapterhub:
        fields = adapterhub_fields(source, fields)
        notes += tuple(
            f"{store}: the head {name} was not read" for name in HEAD_NAMES if name in names
        )
    config = AdapterConfig(source, mlx_fields(source, fields) if of_mlx else fields, of_mlx)
    whole = of_mlx and is_full_mlx(fields)
    if weights is None:
        raise CheckpointError(
            f"{store} has {ADAPTER_CONFIG} and neither {' nor '.join(_FILES)}: the download was "
            "probably cut short, fetch it again"
        )
    beside = [child(store, name) for name in (ADAPTER_CONFIG, CONFIG) if name in names]
    file = child(store, weights)
    modules = open_modules(store, names)
    stored = stored_as(modules.joined(source, store, {file: open_weights(file)}, beside))
    if of_mlx and not whole:
        stored = mlx_factors(stored, config.rank(""))
    if of_adapterhub:
        stored = adapterhub_factors(stored, fields)
    return _as_adapter(stored, config, str(store), whole=whole, notes=notes)


def _as_adapter(
    stored: Checkpoint,
    config: AdapterConfig,
    where: str,
    *,
    whole: bool = False,
    notes: tuple[str, ...] = (),
) -> AdapterCheckpoint:
    """Return the stored tensors as the adapter that the configuration describes."""
    saved = saved_names(stored.headers, config)
    names = {new: old for old, new in saved.items()}
    if old := next((old for old, new in saved.items() if names[new] != old), None):
        raise CheckpointError(
            f"{where} has both '{old}' and '{names[saved[old]]}', of two adapters or copies: save "
            "one alone (model.save_pretrained(FOLDER, selected_adapters=[NAME]))"
        )
    if old := next((old for old, new in saved.items() if new != old), None):
        stored = View(stored, names)
        notes += (f"{where}: '{old}' and its like were read as PEFT saves them, '{saved[old]}'",)
    headers = {name: header for name, header in stored.headers.items() if header.module is None}
    contents = read_names(headers, config, stored.source)
    trained = {name: name for name in stored.headers if name not in headers}
    contents = replace(contents, replaced={**contents.replaced, **trained})
    if (
        not contents.updates
        and not contents.wrapped
        and not contents.folded
        and not ((whole or config.kind) and contents.replaced)
    ):
        raise CheckpointError(
            f"{where} holds no low-rank factors, only {len(stored.headers)} whole tensors: it is no "
            "LoRA adapter. Pass a full model, or the adapter's own folder"
        )
    biases = (name.removesuffix("weight") + "bias" for name in contents.updates)
    lacks = config.fields.get("bias") == "lora_only" and contents.replaced.keys().isdisjoint(biases)
    lost = [_LOST_BIASES.format(stored.source)] if lacks else []
    if config.fields.get("lora_bias") and not any(n.endswith(".lora_B.bias") for n in headers):
        lost.append(_LOST_LORA_BIASES.format(stored.source))
    return AdapterCheckpoint(stored, contents, config, (*notes, *config.notes, *lost))


def _form_of(names: Collection[str]) -> LoraForm:
    """Return which library's names a file without a configuration has."""
    if next(iter(names)).startswith("base_model."):
        return PEFT_FORM
    flat = any(name.endswith(".lora_down.weight") for name in names)
    return KOHYA_FORM if flat else DIFFUSERS_FORM


def _configs_of_parts(file: StoredFile) -> dict[str, AdapterConfig]:
    """Return the configuration of each part of a pipeline, by its prefix, from diffusers' file header."""
    if file.suffix != ".safetensors":
        return {}
    where = f"lora_adapter_metadata of {file}"
    text = SafetensorsFile(file).metadata().get("lora_adapter_metadata", "{}")
    fields = parse_object(text.encode(), where)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        part, dot, field = name.rpartition(".")
        parts.setdefault(part + dot, {"peft_type": "LORA"})[field] = value
    return {part: AdapterConfig(where, settings) for part, settings in parts.items()}
