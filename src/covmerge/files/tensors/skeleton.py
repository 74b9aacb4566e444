"""The model's modules on the meta device, built by transformers from config.json.

This is the only file that imports transformers, and it does so only on demand. It uses transformers'
mapping between stored names and module names, which is no stable interface and may fail with any release.
Names are then related by the base model's prefix alone, and a note says so.

config.json comes from strangers. None of their code is run, nothing is downloaded and no memory is
allocated: keys that could cause that are dropped, and absurd sizes are refused.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.json_file import as_list
from covmerge.files.tensors.modules import (
    MATRICES,
    Kind,
    Place,
    kind_of_parameter,
    known_parts,
    place_of,
)
from covmerge.files.tensors.names import find_name

# Keys that say where code, kernels or weights come from, or how the stored weights are packed.
_DROPPED_KEYS = re.compile(
    r"^_|^auto_map$|^quantization_config$|^(torch_)?dtype$|_implementation$|^use_pretrained_backbone$"
)
_LIMITS = (
    (re.compile(r"layers?$|depths?$|blocks?$|experts?$"), 10_000),
    (re.compile(r"(size|dim|embd|d_model|d_ff)$"), 1 << 24),
    (re.compile(r"labels$"), 100_000),
)
# Largest number of torch's calls while a model is built; each of its tensors takes 3 to 7.
_CALLS = 30_000
_CALLS_PER_STORED_TENSOR = 20
# transformers copies each key some ten times; ImageNet-21k's labels, in both directions, are 44,000.
_MOST_KEYS = 50_000

# The weights of these layers are used without calling the layer, by fused kernels or by transformers. PEFT
# refuses the first, and the others' adapters change no output until they are merged.
_NOT_CALLED = re.compile(
    r"^(falcon_h1|falcon_mamba|mamba2?|nemotron_h)\..*\.(out_proj|conv1d)$"
    r"|^(falcon_mamba|jamba|mamba)\..*\.dt_proj$"
    r"|^wavlm\..*\.attention\.([qkv]|out)_proj$"
    r"|^dab-detr\..*\.k_linear$"
    r"|^longcat_flash\..*\.router\.classifier$"
    r"|^mobilebert\..*\.predictions\.(decoder|dense)$"
)


class SkeletonUnavailable(Exception):
    """The error that no skeleton can be built; its text says why."""


@dataclass(frozen=True)
class Skeleton:
    """The architecture's knowledge about a checkpoint's tensors."""

    architecture: str  # the class that was built
    prefix: str | None  # the model's base_model_prefix; None if it has none
    places: Mapping[str, Place]  # the place of each stored name that the architecture knows
    # Groups of parameter names that share memory, the first defined one first.
    tied: tuple[tuple[str, ...], ...]
    head: str | None  # name of the output layer's weight; None if the model has no output layer
    outside: frozenset[str]  # parameters and buffers outside the backbone
    # Names of the modules that the model runs one after another, each once, as far as its lists of
    # modules show.
    blocks: tuple[str, ...]
    # Paths of models inside the model, each with its class and its model_type.
    parts: Mapping[str, tuple[str, str]]
    notes: tuple[str, ...]  # for the user

    def path(self, name: str) -> str:
        """Return the path of a stored tensor in the backbone, which is the same under any head."""
        return self.places[name].parameter.removeprefix(f"{self.prefix}.")


def build_skeleton(headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Skeleton:
    """Build the model of a config.json without memory, and find the places of the stored tensors in it.

    Raises:
        SkeletonUnavailable: transformers is missing, does not know the model, or cannot build it.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise SkeletonUnavailable(
            "transformers is not installed (pip install 'covmerge[transformers]')"
        ) from None
    try:
        with _silent(transformers):
            return _skeleton(transformers, headers, config)
    except SkeletonUnavailable:
        raise
    # A stranger's config can make transformers fail in any way; then names alone are used.
    except Exception as error:
        raise SkeletonUnavailable(
            f"transformers {transformers.__version__} cannot build a '{config.get('model_type')}' "
            f"from this config.json ({in_short(error)})"
        ) from error


@contextmanager
def quiet(transformers: Any) -> Generator[None]:
    """Hide transformers' progress bars and advice, which do not apply here."""
    logging, hub = transformers.utils.logging, importlib.import_module("huggingface_hub.utils")
    bars, hidden = logging.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    with _without_advice(transformers):
        # transformers switches the bars of the Hub's client too, which warns if a variable decides them.
        with _without_warnings():
            logging.disable_progress_bar()
        try:
            yield
        finally:
            with _without_warnings():
                if bars:
                    logging.enable_progress_bar()
                if hidden:
                    hub.disable_progress_bars()


@contextmanager
def _without_advice(transformers: Any) -> Generator[None]:
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


@contextmanager
def _without_warnings() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _silent(transformers: Any) -> Generator[None]:
    with _without_advice(transformers), _without_warnings():
        yield


def _skeleton(
    transformers: Any, headers: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> Skeleton:
    model, notes = _build(transformers, config, len(headers))
    slots = _slots(model)
    base_class = transformers.MODEL_MAPPING.get(type(model.config), None)
    if isinstance(base_class, tuple):  # a family with several, the usual one first
        base_class = cast("tuple[Any, ...]", base_class)[0]
    prefix = _prefix(model, base_class)
    places, place_notes = _find_places(model, slots, headers, prefix)
    return Skeleton(
        architecture=type(model).__name__,
        prefix=prefix,
        places=places,
        tied=_tied_groups(model),
        head=_head(model),
        outside=_outside(model, slots, prefix, base_class, len(headers)),
        blocks=_blocks(model),
        parts=_parts(model, transformers.PreTrainedModel),
        notes=(*notes, *place_notes),
    )


class _NotFarBeyond(TorchFunctionMode):
    """Ends the construction of a model that has far more tensors than are stored.

    Only the architecture knows which keys of a config multiply the number of tensors. Each parameter is
    made by calls of torch that pass through here.
    """

    def __init__(self, stored: int) -> None:
        super().__init__()
        self._stored = stored
        self._left = _CALLS + _CALLS_PER_STORED_TENSOR * stored

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise SkeletonUnavailable(
                f"config.json means a model of far more tensors than the {self._stored} stored ones"
            )
        return func(*args, **(kwargs or {}))


def empty_model(config: Mapping[str, Any], stored: int) -> tuple[Any, list[str]]:
    """Return the model of a config on the meta device, and notes; `stored`: its count of stored tensors."""
    transformers: Any = importlib.import_module("transformers")
    with _silent(transformers):
        return _build(transformers, config, stored)


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with transformers' defaults filled in; unchanged if these are unknown."""
    try:
        transformers: Any = importlib.import_module("transformers")
        with _silent(transformers):
            return _configured(transformers, config).to_dict()
    except Exception:  # a stranger's config may fail in any way
        return config


def _build(transformers: Any, config: Mapping[str, Any], stored: int) -> tuple[Any, list[str]]:
    """Return the model on the meta device, and notes."""
    built = _configured(transformers, config)
    architecture = architecture_of(config)
    model_class: Any = getattr(transformers, architecture or "", None)
    known = _is_model_of(transformers, model_class, built)
    from_config = model_class._from_config if known else transformers.AutoModel.from_config
    with torch.device("meta"), _NotFarBeyond(stored):
        model = from_config(built, attn_implementation="eager")
    if known or architecture is None:
        return model, []
    return model, [
        f"architecture '{architecture}' is no class of transformers {transformers.__version__} for "
        f"model_type '{built.model_type}': roles come from {type(model).__name__}"
    ]


def _configured(transformers: Any, config: Mapping[str, Any]) -> Any:
    """Return the config as an object of transformers' class for this kind of model."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SkeletonUnavailable("config.json has no model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise SkeletonUnavailable(
            f"model_type '{model_type}' is unknown to transformers {transformers.__version__}"
        )
    refuse_many_keys(config)
    values = {k: v for k, v in _without_dropped_keys(config).items() if k != "model_type"}
    _refuse_absurd_sizes(values)
    return transformers.AutoConfig.for_model(model_type, **values)


def architecture_of(config: Mapping[str, Any] | None) -> str | None:
    """Return config.architectures[0], if there is one."""
    names = as_list((config or {}).get("architectures"))
    return str(names[0]) if names else None


def _is_model_of(transformers: Any, model_class: Any, config: Any) -> bool:
    return (
        isinstance(model_class, type)
        and issubclass(model_class, transformers.PreTrainedModel)
        and isinstance(config, getattr(model_class, "config_class", None) or ())
    )


def _without_dropped_keys(value: Any) -> Any:
    """Return a value without the dropped keys, with infinity as a number, as transformers reads it."""
    if isinstance(value, list):
        return [_without_dropped_keys(item) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    values = cast("Mapping[str, Any]", value)
    if set(values) == {"__float__"} and values["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(values["__float__"])
    return {k: _without_dropped_keys(v) for k, v in values.items() if not _DROPPED_KEYS.search(k)}


def refuse_many_keys(config: Mapping[str, Any]) -> None:
    """Raise an error for a config with too many keys to process quickly; dropped keys do not count."""
    count = _keys({key: value for key, value in config.items() if not _DROPPED_KEYS.search(key)})
    if count > _MOST_KEYS:
        raise SkeletonUnavailable(
            f"config.json has {count} keys, and no model needs more than {_MOST_KEYS}"
        )


def _keys(values: Mapping[str, Any]) -> int:
    inner = (_keys(cast("dict[str, Any]", v)) for v in values.values() if isinstance(v, dict))
    return len(values) + sum(inner)


def _refuse_absurd_sizes(values: Mapping[str, Any]) -> None:
    """Raise an error for counts that would make the construction endless or need real memory."""
    for key, value in values.items():
        if isinstance(value, dict):
            _refuse_absurd_sizes(cast("dict[str, Any]", value))
        numbers = cast("list[Any]", value) if isinstance(value, list) else [cast("Any", value)]
        largest = max((n for n in numbers if isinstance(n, int | float)), default=0)
        if any(pattern.search(key) and largest > limit for pattern, limit in _LIMITS):
            raise SkeletonUnavailable(f"config.json has '{key}': {largest}, which is absurd")


def _slots(model: Any) -> dict[str, Place]:
    """Return every parameter and buffer of the model, by dotted name."""
    output: Any = model.get_output_embeddings()
    entry: Any = None
    with suppress(NotImplementedError):
        entry = model.get_input_embeddings()
    slots: dict[str, Place] = {}
    configs: dict[str, Any] = {}
    full = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules(remove_duplicate=False):
        config = getattr(module, "config", None) or configs.get(path.rpartition(".")[0])
        configs[path] = config
        stem = f"{path}." if path else ""
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            kind = kind_of_parameter(module, leaf, parameter, is_output=module is output)
            # Tables of positions are seldom called as layers.
            aside = kind.role is Role.EMBEDDING and module is not entry
            if aside or _NOT_CALLED.search(f"{model.config.model_type}.{path}"):
                kind = replace(kind, takes_factors=False)
            # By the ends and beginnings of paths, as transformers' quantisers exclude modules.
            if path.endswith(full) or any(path.startswith(f"{name}.") for name in full):
                kind = replace(kind, stays_full=True)
            shape = tuple(parameter.shape)
            parts = None
            if kind.role in MATRICES:
                d_out = shape[-1] if kind.transposed else shape[-2]
                parts = known_parts(f"{stem}{leaf}", module, config, d_out)
            slots[f"{stem}{leaf}"] = Place(f"{stem}{leaf}", kind, parts, shape)
        for leaf, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            rebuilt = leaf in module._non_persistent_buffers_set
            kind = Kind(Role.BUFFER, f"buffer of {type(module).__name__}", rebuilt=rebuilt)
            slots[f"{stem}{leaf}"] = Place(f"{stem}{leaf}", kind, None, tuple(buffer.shape))
    return slots


def _tied_groups(model: Any) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _head(model: Any) -> str | None:
    output: Any = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is output and isinstance(getattr(module, "weight", None), nn.Parameter):
            return f"{path}.weight"
    return None


def _prefix(model: Any, base_class: Any) -> str | None:
    """Return the name of the backbone in a model with a head, as transformers declares it or as it is."""
    declared: str = model.base_model_prefix
    if base_class is not None and not isinstance(getattr(model, declared, None), nn.Module):
        held = [name for name, child in model.named_children() if isinstance(child, base_class)]
        if held:
            return held[0]
    return declared or None


def _outside(
    model: Any, slots: Mapping[str, Place], prefix: str | None, base_class: Any, stored: int
) -> frozenset[str]:
    """Return the names outside the backbone: not under the prefix, or not in the family's base class."""
    if prefix is not None and isinstance(getattr(model, prefix, None), nn.Module):
        return frozenset(name for name in slots if not name.startswith(f"{prefix}."))
    if base_class is None or isinstance(model, base_class):
        return frozenset()
    with torch.device("meta"), _NotFarBeyond(stored):
        base = base_class._from_config(model.config)
    return frozenset(slots.keys() - _slots(base).keys())


def _parts(model: Any, of: type) -> dict[str, tuple[str, str]]:
    """Return the models inside a model that are of another kind than the model around them."""
    kinds = {
        path: (type(module).__name__, str(module.config.model_type))
        for path, module in model.named_modules()
        if isinstance(module, of)
    }

    def around(path: str) -> str:
        others = (o for o in kinds if o != path and (not o or path.startswith(f"{o}.")))
        return max(others, default="")

    return {path: kind for path, kind in kinds.items() if kind[1] != kinds[around(path)][1]}


def model_type_of(architecture: str) -> str | None:
    """Return the model_type of a class of transformers; None if there is no such class."""
    try:
        transformers: Any = importlib.import_module("transformers")
        return getattr(getattr(transformers, architecture).config_class, "model_type", None)
    except Exception:  # the name is a stranger's, and what it imports may be missing
        return None


def _blocks(model: Any) -> tuple[str, ...]:
    """Return the elements of the outermost lists of modules; none if the model runs a list repeatedly."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    # The elements of a list of lists are called; the inner list itself is not.
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    longest = max((len(modules) for modules in outer.values()), default=0)
    if getattr(model.config, "num_hidden_layers", longest) > longest:  # ALBERT's case
        return ()
    return tuple(name for path, modules in outer.items() for name in _elements(path, modules))


def _elements(path: str, modules: Any) -> Iterator[str]:
    """Yield the names of a list's elements, and of those of inner lists; a childless layer is no block."""
    for index, module in enumerate(modules):
        name = f"{path}.{index}"
        if isinstance(module, nn.ModuleList):
            yield from _elements(name, module)
        elif next(module.children(), None) is not None:
            yield name


def _find_places(
    model: Any, slots: Mapping[str, Place], headers: Mapping[str, TensorHeader], prefix: str | None
) -> tuple[dict[str, Place], list[str]]:
    """Relate stored names to the model's, as transformers' loader does, or else by the prefix alone."""
    try:
        return _places_by_loader(model, slots, headers, prefix), []
    except Exception as error:
        places = {
            name: place_of(slots[target], header, None)
            for name, header in headers.items()
            if (target := find_name(name, [str(prefix)], slots)) is not None
        }
        note = (
            f"transformers' mapping of stored names cannot be used ({in_short(error)}): "
            "stored names are compared with the model's as they are"
        )
        return places, [note]


def _places_by_loader(
    model: Any, slots: Mapping[str, Place], headers: Mapping[str, TensorHeader], prefix: str | None
) -> dict[str, Place]:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversion: Any = importlib.import_module("transformers.conversion_mapping")
    transforms: list[Any] = conversion.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    places: dict[str, Place] = {}
    # Some renamings depend on the names before, so the loader's order matters.
    for name in sorted(headers, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, slots)
        if target not in slots:  # the name has the new form already, which a renaming can spoil
            target, pattern = loading.rename_source_key(name, [], [], prefix, slots)
        if target in slots:
            converter = by_pattern[pattern] if pattern is not None else None
            places[name] = place_of(slots[target], headers[name], converter)
    return places


def in_short(error: Exception) -> str:
    """Return the type of an error, and the first line of its text."""
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line[:200]}"
