"""GGUF files of language models whose tensors correspond one to one to those that transformers saves.

`gguf.dequantize` decodes the blocks of a type. Names, the config, and llama.cpp's changes to tensors (rows
of q and k in another order, transposed tensors, norms plus one) are undone by the tables of transformers'
GGUF loader. These tables are no stable interface: if a release lacks them, the error names them. That
loader stacks experts as its modules hold them; here experts get the names under which transformers saves
them one by one. The loader reads Mixtral as a Llama; here Mixtral is recognised by its number of experts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import QUANTISATION
from covmerge.files.checkpoints.json_file import as_object, shorten
from covmerge.files.quantised.gguf_file import COUNT, GgufSettings, block_of, gguf_package
from covmerge.files.quantised.packed import DTYPE_KEYS, ByRows, Found, Read, Stored, dtype_of
from covmerge.files.tensors.skeleton import SkeletonUnavailable, empty_model, in_short

_LOADER = "transformers.modeling_gguf_pytorch_utils"
# Processors that change one tensor into one, except for stacks of experts.
_ONE_FOR_ONE = frozenset(
    f"{name}TensorProcessor" for name in ("", "Llama", "GPT2", "Nemotron", "Gemma2", "Qwen2Moe")
)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+\.")
# Tensors that hold what a config states already, and belong to no parameter.
_OF_NO_PARAMETER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CONVERT = "convert the model again"
_CONFIG = "put the model's config.json beside it, and pass the folder"
# Entries of a config by the metadata's keys after the architecture's name.
_STATED = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
# Entries that transformers' loader does not put into a config, by the keys after the architecture's name.
_LEFT_OUT = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_QWEN_EXPERTS = ("qwen2moe", "qwen3moe")
_DEPTH = 2  # levels of modules to search for the one where names begin
_ROPE = "rope.freq_base"
_ROUNDED = 1e-6
# The dtype of reading for a file of one plain type; any other file is read as bfloat16.
_READ = {"F32": torch.float32, "F16": torch.float16}
PLAIN: Mapping[str, torch.dtype] = MappingProxyType({**_READ, "BF16": torch.bfloat16})

Values = NDArray[np.float32]


@dataclass(frozen=True)
class GgufTensor(ByRows):
    """A tensor of the file, with what llama.cpp's converter did to it.

    Rows in another order can be read separately; after any other change it is unpacked as a whole.

    Attributes:
        kind: GGUF's name of its type.
        order: for a group of rows, the stored row of each plain row; all groups have the same order.
            None: rows are stored in order.
        transposed: whether it is stored transposed.
        more: the number that was added to each of its elements.
        flat: whether it is stored without its first axis, which has size 1.
    """

    kind: str
    order: tuple[int, ...] | None = None
    transposed: bool = False
    more: float = 0.0
    flat: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is unpacked as a whole."""
        return self.transposed or self.flat or bool(self.more)

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        if not self.whole:
            super().fill(out, rows, read)
            return
        stored = _dequantised(read(self.stored[0], None), self.kind)
        plain = stored[None] if self.flat else stored.mT if self.transposed else stored
        out.copy_(plain[rows.start : rows.stop] - self.more)

    def unpacked(self, rows: range, read: Read) -> Tensor:
        (name,) = self.stored
        if self.order is None:
            return _dequantised(read(name, rows), self.kind)
        size, plain = len(self.order), torch.arange(rows.start, rows.stop)
        places = plain // size * size + torch.tensor(self.order)[plain % size]
        first = int(places.min())
        span = range(first, int(places.max()) + 1)
        return _dequantised(read(name, span), self.kind)[places - first]


def find(stored: Stored) -> Found:
    """Return the tensors of a GGUF file; see `Found`."""
    try:
        loader: Any = importlib.import_module(_LOADER)
    except ImportError as error:
        stored.refuse(f"transformers' GGUF loader, by which it is read, is missing ({error})")
    assert isinstance(stored.settings, GgufSettings)
    settings = stored.settings
    metadata, types = settings.metadata, settings.types
    architecture = metadata.get("general.architecture")
    made = loader.TENSOR_PROCESSORS.get(str(architecture), loader.TensorProcessor)
    # For other architectures nothing undoes the converter's changes, such as 1 more in norms of the first
    # Gemma.
    known = {*loader.TENSOR_PROCESSORS, *loader.GGUF_SUPPORTED_ARCHITECTURES}
    if made.__name__ not in _ONE_FOR_ONE or architecture not in known:
        stored.refuse(f"its architecture, {shorten(architecture)}, is none of those that are read")
    if architecture == "falcon" and metadata.get("falcon.attention.head_count_kv", 1) != 1:
        stored.refuse(
            "it is a Falcon with several heads of keys, and nobody undoes the order in which llama.cpp's "
            "converter puts the rows of its query_key_value"
        )
    config = _config(stored, settings, loader)
    try:
        model, _ = empty_model(config, len(types))
        processor = made(config=config)
        shapes = _saved_shapes(model, one_by_one=bool(settings.stacks))
        known = {_EXPERT.sub("", name): name for name in shapes}
        how = (processor, str(architecture))
        names: dict[str, str] = loader.get_gguf_hf_weights_map(_Outer(model, 0, known), *how)
        if not settings.stacks and not types.keys() <= names.keys() | _OF_NO_PARAMETER:
            names = loader.get_gguf_hf_weights_map(_Outer(model, _DEPTH), *how)
    except SkeletonUnavailable as error:
        stored.refuse(f"transformers cannot build its model ({error})", _by_config(stored))
    except Exception as error:  # a stranger's config can make it fail in any way
        stored.refuse(
            f"transformers cannot build its model ({in_short(error)})", _by_config(stored)
        )
    _check_config(stored, metadata, model.config)
    _check_experts(stored, metadata)
    names |= _of_experts(stored, settings.stacks, names, shapes)
    whole = [name for name in types if name in names and names[name] not in shapes]
    if whole:
        shape = stored.checkpoint.headers[whole[0]].shape
        stored.refuse(
            f"'{whole[0]}' is {list(shape)}, and a stack of experts is (experts, d_out, d_in)",
            _CONVERT,
        )
    unknown = [name for name in types if name not in names and name not in _OF_NO_PARAMETER]
    if unknown:
        only_biases = all(name.endswith(".bias") for name in unknown)
        stored.refuse(
            f"transformers has no parameter for {some(unknown, quoted=True)}",
            _by_config(stored) if only_biases else None,
        )
    headers = stored.checkpoint.headers
    kinds = {kind for name, kind in types.items() if len(headers[name].shape) > 1}
    dtype = read_as(stored.checkpoint.config or {}, kinds)
    tensors = tuple(
        _tensor(
            stored, name, TensorHeader(names[name], shapes[names[name]], dtype), kind, processor
        )
        for name, kind in types.items()
        if name in names
    )
    said = f"GGUF, {some(dict.fromkeys(types.values()))}"
    stated = str(dtype).removeprefix("torch.")
    unused = frozenset(name for name in types if name not in names)
    return Found(tensors, said, unused, {**config, "dtype": stated}, turned=True)


def _saved_shapes(model: Any, *, one_by_one: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name; `one_by_one`: as saved, one tensor per expert."""
    held = model.state_dict()
    if one_by_one:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        held = loading.revert_weight_conversion(model, held)
    return {name: tuple(value.shape) for name, value in held.items()}


def _of_experts(
    stored: Stored,
    stacks: Mapping[str, tuple[str, ...]],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Return the names of the matrices in stacks of experts, checked against the model's count."""
    found: dict[str, str] = {}
    for stack, members in stacks.items():
        before, between, after = names.get(stack, "").partition(".experts.")
        if not between:
            stored.refuse(f"transformers saves no experts that are '{stack}'")
        matrices = [f"{before}{between}{number}.{after}" for number in range(len(members) + 1)]
        if any(name not in shapes for name in matrices[:-1]) or matrices[-1] in shapes:
            stored.refuse(
                f"'{stack}' has {len(members)} experts, and its config gives another number"
            )
        found.update(zip(members, matrices, strict=False))
    return found


class _Outer:
    """A model that shows only those of its modules that are at most `depth` levels deep.

    transformers looks for the tensors' names in the model, and again in every module of it, for the few
    architectures whose names lack their beginning. That takes nearly all of the time to open a small
    model, and minutes if a name belongs to no parameter.
    """

    def __init__(self, module: Any, depth: int, names: Collection[str] | None = None) -> None:
        self.config = getattr(module, "config", None)
        self._names = names
        self._module = module
        self._inside = module.named_children() if depth else ()
        self._depth = depth

    def state_dict(self) -> Collection[str]:
        """Return the parameters' names; the loader asks for nothing else."""
        return self._module.state_dict() if self._names is None else self._names

    def named_children(self) -> Iterator[tuple[str, _Outer]]:
        """Yield the modules inside that the loader may search."""
        return ((name, _Outer(module, self._depth - 1)) for name, module in self._inside)


def _config(stored: Stored, settings: GgufSettings, loader: Any) -> dict[str, Any]:
    """Return the config beside the file, or the one that transformers makes of its metadata."""
    transformers: Any = importlib.import_module("transformers")
    given = stored.checkpoint.config or {}
    config: dict[str, Any] = {key: value for key, value in given.items() if key != QUANTISATION}
    try:
        if not config:
            file = settings.file
            path = None if file.store.folder is None else str(file.path)
            config = loader.load_gguf_checkpoint(path)["config"]
            config |= _left_out(settings.metadata) | _of_other_parts(stored, settings, config)
            config |= _of_heads(settings.metadata, transformers.AutoConfig.for_model(**config))
        kind: Any = transformers.AutoConfig.for_model(**config)
    except Exception as error:  # a stranger's metadata can make it fail in any way
        stored.refuse(
            f"transformers cannot make a config of its metadata ({in_short(error)})",
            _by_config(stored),
        )
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind.__class__, None)
    if model is None:
        stored.refuse(
            f"{shorten(config.get('model_type'))} is no language model that transformers knows"
        )
    named = {key: value for key, value in config.items() if not key.startswith("_")}
    return {"architectures": [model.__name__], **named}


def _left_out(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """Return what metadata say of experts and transformers' loader does not put into the config."""
    architecture = metadata.get("general.architecture")
    if architecture in _QWEN_EXPERTS:
        found = {name: metadata.get(f"{architecture}.{key}") for key, name in _LEFT_OUT.items()}
        return {name: value for name, value in found.items() if value is not None}
    count = metadata.get("llama.expert_count")
    if architecture != "llama" or not count:
        return {}
    used = metadata.get("llama.expert_used_count")
    return {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": used}


def _of_other_parts(
    stored: Stored, settings: GgufSettings, config: Mapping[str, Json]
) -> dict[str, Json]:
    """Return what a config says of tensors; transformers' loader saw those of the first part alone."""
    architecture = settings.metadata.get("general.architecture")
    if (
        settings.metadata.get(COUNT, 0) in (0, 1) or architecture == "falcon"
    ):  # its head is always tied
        return {}
    if architecture == "stablelm":  # more of its config follows from its tensors
        stored.refuse("transformers makes its config of the first part alone", _CONFIG)
    tied = config.get("tie_word_embeddings") and "output.weight" not in settings.types
    return {"tie_word_embeddings": bool(tied)}


def _of_heads(metadata: Mapping[str, Json], config: Any) -> dict[str, Json]:
    """Return the size of a head if the metadata state another than the config made of them has."""
    stated = metadata.get(f"{metadata.get('general.architecture')}.attention.key_length")
    made = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {} if stated in (None, made) else {"head_dim": stated}


def _is_config_made(stored: Stored) -> bool:
    """Return whether there is no config beside the file."""
    return not stored.checkpoint.config or set(stored.checkpoint.config) == {QUANTISATION}


def _by_config(stored: Stored) -> str | None:
    return _CONFIG if _is_config_made(stored) else None


def check_rope(model: Checkpoint) -> None:
    """Check that a config made of metadata is not used for a file that scales its rope.

    Such a config never has the scaling.

    Raises:
        CheckpointError: the file scales its rope.
    """
    settings = None if model.quantisation is None else model.quantisation.settings
    if not isinstance(settings, GgufSettings):
        return
    metadata = settings.metadata
    key = f"{metadata.get('general.architecture')}.rope.scaling.type"
    found = [name for name in _OF_NO_PARAMETER if name in settings.tensors]
    found += [key] if metadata.get(key, "none") != "none" else []
    if found:
        raise CheckpointError(
            f"{model.source} scales its rope ({found[0]}), and the config that transformers makes of its "
            f"metadata would not: {_CONFIG}, or write a GGUF file ({Hint('quantise', 'gguf')})"
        )


def _check_config(stored: Stored, metadata: Mapping[str, Json], config: Any) -> None:
    """Check that a config beside the file agrees with the file's numbers, which order q's and k's rows."""
    if _is_config_made(stored):
        return
    config = config.get_text_config()
    theta = as_object(getattr(config, "rope_parameters", None)).get("rope_theta")
    held = {key: getattr(config, name, None) for key, name in _STATED.items()} | {_ROPE: theta}
    for key, value in held.items():
        full = f"{metadata.get('general.architecture')}.{key}"
        stated = metadata.get(full)
        if stated is None or value is None or _same(stated, value):
            continue
        stored.refuse(
            f"its {full} is {shorten(stated)}, where its config gives {shorten(value)}",
            "remove or correct the config.json beside it",
        )


def _check_experts(stored: Stored, metadata: Mapping[str, Json]) -> None:
    """Check that a mixture uses at least one of its experts, and no more than it has."""
    architecture = metadata.get("general.architecture")
    count = metadata.get(f"{architecture}.expert_count")
    if not isinstance(count, int) or not count:
        return
    used = metadata.get(f"{architecture}.expert_used_count")
    if not isinstance(used, int) or not 1 <= used <= count:
        said = "missing" if used is None else shorten(used)
        stored.refuse(
            f"its {architecture}.expert_used_count is {said}, and should be from 1 to {count}, its "
            "expert_count",
            _CONVERT,
        )


def _same(stated: object, value: object) -> bool:
    """Return whether two numbers are equal, of which one may have been rounded to float32."""
    if not isinstance(stated, int | float) or not isinstance(value, int | float):
        return stated == value
    near = _ROUNDED * abs(stated)  # bounded by the file; a config's number may be of any size
    return stated - near <= value <= stated + near


def read_as(config: Mapping[str, Any], kinds: Collection[str]) -> torch.dtype:
    """Return the dtype of reading: the config's, else its matrices' plain type, else bfloat16."""
    if not any(key in config for key in DTYPE_KEYS) and len(kinds) == 1:
        return _READ.get(next(iter(kinds)), torch.bfloat16)
    return dtype_of(config)


def _tensor(
    stored: Stored, name: str, header: TensorHeader, kind: str, processor: Any
) -> GgufTensor:
    """Return a tensor with the way to undo the converter's changes, after checking its size.

    The changes are found by what transformers makes of numbers that encode their places: another order of
    rows, a transpose, or a number subtracted. They can therefore be made again when a file is written.
    """

    def undo(values: Values) -> Values:
        parsed: dict[str, Any] = {"tensors": {}}
        try:
            plain = processor.process(weights=values, name=name, parsed_parameters=parsed).weights
        except Exception as error:  # its sizes, and those of the config, are a stranger's
            stored.refuse(
                f"'{name}' is {list(values.shape)}, of which transformers cannot undo what "
                f"llama.cpp's converter did ({in_short(error)})"
            )
        # The loader adds an axis that older converters dropped, also where it is stored.
        return plain[0] if plain.shape == (1, *values.shape) and whole else plain

    block, size = _sizes(stored, name, kind)
    held = stored.checkpoint.headers[name]
    shape = (*held.shape[:-1], held.shape[-1] // size * block) if size else held.shape
    whole = len(shape) == len(header.shape)
    by_row = _counted(shape[0], *(1 for _ in shape[1:]))
    found: Any = undo(by_row)
    if found.shape == by_row.shape and (np.sort(found, axis=0) == by_row).all():
        _check_shape(stored, name, header, shape)
        return GgufTensor(header, (name,), kind, _repeated(found.reshape(-1)))
    one = np.broadcast_to(np.ones(1, np.float32), shape)  # takes the memory of one number
    _check_shape(stored, name, header, tuple(undo(one).shape))
    probe = _counted(2, 3) if len(shape) == 2 else by_row
    found = undo(probe)
    flat = found.shape == (1, *probe.shape)
    turned = len(shape) == 2 and found.shape == probe.T.shape
    more = float(probe.reshape(-1)[0] - found.reshape(-1)[0])
    expected = probe[None] if flat else probe.T if turned else probe
    if not np.array_equal(found, expected - more):
        stored.refuse(f"transformers does to '{name}' what covmerge does not know")
    return GgufTensor(header, (name,), kind, None, turned, more, flat)


def _counted(*shape: int) -> Any:
    """Return numbers that encode their places."""
    numbers: Any = np.arange(prod(shape))
    return numbers.reshape(shape)


def _repeated(order: Any) -> tuple[int, ...] | None:
    """Return the order within the smallest group of rows for which all groups agree; None: all in order."""
    if (order == np.arange(len(order))).all():
        return None
    ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(len(order))) + 1
    size = int(ends[0])
    if len(order) % size == 0:
        groups: Any = order.reshape(-1, size) - np.arange(0, len(order), size)[:, None]
        if (groups == groups[0]).all():
            order = groups[0]
    return tuple(order.tolist())


def _check_shape(stored: Stored, name: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
    if shape != header.shape:
        stored.refuse(
            f"'{name}' is {list(shape)}, where its config gives '{header.name}' {list(header.shape)}",
            _by_config(stored),
        )


def _sizes(stored: Stored, name: str, kind: str) -> tuple[int, int]:
    """Return the numbers and bytes of a block; 1 and 0 for plain numbers."""
    if stored.checkpoint.headers[name].dtype is not torch.uint8:
        return 1, 0
    block, size = block_of(kind)
    try:
        _dequantised(torch.zeros(1, size, dtype=torch.uint8), kind)
    except NotImplementedError:
        stored.refuse(f"'{name}' is {kind}, which gguf does not dequantise")
    return block, size


def _dequantised(rows: Tensor, kind: str) -> Tensor:
    """Return rows in float32, from plain numbers or from blocks."""
    if rows.dtype is not torch.uint8:
        return rows.float()
    package = gguf_package()
    values = package.dequantize(rows.numpy(), package.GGMLQuantizationType[kind])
    return cast("Any", torch).from_numpy(values)
