"""Translation of the names of an adapter's tensors into the updates that the tensors form."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.config import MERGE_FIRST, AdapterConfig
from covmerge.files.adapters.folds import Folded, computed_in
from covmerge.files.adapters.layout import PREFIX
from covmerge.files.adapters.other_libraries import MLX_ENDS, MLX_NAME
from covmerge.files.adapters.types import OF_FILES, TYPES, AdapterType, kind_of
from covmerge.files.adapters.types.entries import TOKENS, TRAINABLE_TOKENS
from covmerge.files.adapters.types.lora import DIAGONAL, MAGNITUDE
from covmerge.files.adapters.types.lycoris import DIFF, DIFFERENCE, OF_BIAS, OF_GROUPS, is_grouped
from covmerge.files.checkpoints.view import without_wrappers

_PARTS = {  # ends of names; a longer end comes before a shorter one that it ends in
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "table_down",
    ".lora_embedding_B": "table_up",
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_diag": DIAGONAL,
    ".token_adapter.trainable_tokens_delta": TOKENS,
}
_ADALORA_PARTS = {".lora_A": "down", ".lora_B": "up", ".lora_E": "middle", ".ranknum": "divisor"}
_FILE_PARTS = _PARTS | {  # of Kohya's scripts and diffusers
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".alpha": "alpha",
    ".dora_scale": MAGNITUDE,
    **{end: part for kind in OF_FILES for end, part in kind.ends.items()},
}
_BEGIN = {  # what the names of parts begin with; two words of `ln_tuning_layers`, as GPT-2 has an `ln_1`
    re.sub(r"^(ln_[^_]*|[^_]*).*", r"\1", end.split(".")[1])
    for kind in TYPES.values()
    if kind is not TRAINABLE_TOKENS
    for end in (*kind.ends, *kind.whole)
}
_OWN = re.compile(
    rf"(^|\.)(({'|'.join(sorted({'lora', *_BEGIN}))})_|"
    r"token_adapter\.|trainable_tokens|dora_scale$|diff$|diff_b$)"
)
# Tensors that VeLoRA and MonteCLoRA use only in training; the trained model computes plain LoRA.
_OF_TRAINING = re.compile(r"\.lora_(velora_embed$|monteclora_sampler\.)")
# A whole table under trained tokens; PEFT saves it if the table was resized.
_RESIZED = ".token_adapter.base_layer."
# The two copies that PEFT also saves of a whole trained table when it saves embeddings.
_COPIES = re.compile(r"\.(?:modules_to_save|original_module)(?=\.)")
_LEAF = re.compile(r"\.(?:weight|bias)$")
_PARALLEL = "module."  # of DistributedDataParallel
_OUT_PROJ = ".base_layer.out_proj"  # of nn.MultiheadAttention
_Parts = Mapping[str, TensorHeader]
_FLAT = ("lora_unet_", "lora_te", "lycoris_")
_OF_TLORA = ("p_layer.", "q_layer.", "lambda_layer")  # parts of names
# PEFT does not read these files.
_MERGE_FILE_FIRST = (
    "merge it into its base with LyCORIS (names with lycoris_: net, _ = "
    "lycoris.create_lycoris_from_weights(1.0, FILE, model); net.merge_to(1.0). Names with lora_unet_ and "
    "lora_te: lycoris.utils.merge([pipe.text_encoder], pipe.unet, load_file(FILE), 1.0)), save the model, "
    "and merge full models"
)


@dataclass(frozen=True)
class Stacked:
    """The part of the factors of a stack of matrices `(count, ·, ·)` that one update takes.

    Attributes:
        count: number of matrices. `down` has r rows for each matrix, one matrix after another; `up`
            has the columns of all matrices, term after term.
        index: the number of the matrix that the base's tensor stores; None: the base stores the stack.
        rows: the rows of that matrix that the base's tensor has.
        held: number of elements of all factors of the module, which are read whole.
        by_expert: whether the columns of `up` are ordered matrix after matrix, as in Unsloth's files.
    """

    count: int
    index: int | None = None
    rows: range | None = None
    held: int = 0
    by_expert: bool = False


@dataclass(frozen=True)
class Update:
    """One low-rank update, scale · up · diag(middle) · down, with the names of its stored tensors.

    Attributes:
        name: the base's tensor that it is added to.
        shape: the shape of that tensor as a matrix: all axes after the first are one.
        rank: number of terms.
        dtype: the dtype of the stored factors.
        up: `(d_out, r)`; if `down` is None, the column that is added to a bias.
        down: `(r, d_in)`.
        scale: the factor that the configuration gives.
        transposed: whether the base's tensor is `(d_in, d_out)`.
        table: whether the base's tensor is an embedding.
        middle: name of a tensor of r numbers, multiplied between the factors.
        alpha: name of a tensor with one number that multiplies the scale.
        divisor: name of a tensor with one number that divides the scale.
        stack: set if the factors are those of a stack of matrices; then `rank` is the rank of each.
        written: the tensor's name in the adapter's file, if the base has another name for it.
        order: for each row of `up`, the number of the stored row; None: the order is the same.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    dtype: torch.dtype
    up: str
    down: str | None
    scale: float
    transposed: bool = False
    table: bool = False
    middle: str | None = None
    alpha: str | None = None
    divisor: str | None = None
    stack: Stacked | None = None
    written: str | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Wrapped:
    """The factors of one parameter of a module; only the base tells which parameter, and its shape.

    Attributes:
        owner: the module.
        parameters: the module's parameters that the configuration targets.
        shape: `(d_out, d_in)` of the product.
        terms: number of rows of `down`; for a stack, of all matrices together.
        dtype: the dtype of the stored factors.
        up: name of the tensor `(d_out, terms)`.
        down: name of the tensor `(terms, d_in)`.
    """

    owner: str
    parameters: tuple[str, ...]
    shape: tuple[int, int]
    terms: int
    dtype: torch.dtype
    up: str
    down: str

    @property
    def numel(self) -> int:
        """Number of elements of both factors."""
        return self.terms * sum(self.shape)


@dataclass(frozen=True)
class Contents:
    """The contents of an adapter: updates, and names of whole tensors, both by the base's names.

    `wrapped` has factors whose tensors have not been found in a base yet, by the adapter's names.
    `folded` has layers whose update is not a product of stored factors. `root` is what begins the
    base's names of the part that an adapter was made on, and `own` has its own names by the base's.
    """

    updates: Mapping[str, Update]
    replaced: Mapping[str, str]
    wrapped: Mapping[str, Wrapped] = field(default_factory=dict[str, Wrapped])
    folded: Mapping[str, Folded] = field(default_factory=dict[str, Folded])
    root: str = ""
    own: Mapping[str, str] = field(default_factory=dict[str, str])

    def renamed(self, names: Mapping[str, str], root: str) -> Contents:
        """Return the contents under other names, except `wrapped`, which are looked up under `root`."""

        def to(name: str) -> str:
            return names.get(name, name)

        return Contents(
            {to(name): replace(one, name=to(name)) for name, one in self.updates.items()},
            {to(name): stored for name, stored in self.replaced.items()},
            self.wrapped,
            {to(name): replace(one, name=to(name)) for name, one in self.folded.items()},
            root,
            {name: own for own, name in names.items()},
        )


def looks_like_adapter(names: Iterable[str]) -> bool:
    """Return whether a file of weights holds an adapter and no model.

    Example:
        >>> looks_like_adapter(["lora_unet_mid_block.alpha", "lora_unet_mid_block.lora_up.weight"])
        True
        >>> looks_like_adapter(["model.embed_tokens.weight"])
        False
    """
    ends = (*(end for end in _FILE_PARTS if end != ".alpha"), *MLX_ENDS)
    return any(name.endswith(ends) or name.startswith(_FLAT) for name in names)


def saved_names(names: Iterable[str], config: AdapterConfig) -> dict[str, str]:
    """Return the names under which PEFT saves tensors, by the names in a running model's state dict.

    Example: `.lora_A.weight` for `.lora_A.default.weight`. Names without an adapter's name stay.
    """
    kind = config.kind
    ends = _ends(config) if kind is None else {**kind.ends, **kind.whole}
    stems = {re.escape(_LEAF.sub("", end)) for end in ends} | {r"\.modules_to_save"}
    either = "|".join(sorted(stems, key=len, reverse=True))
    named = re.compile(rf"({either})\.(?!(?:weight|bias)$)[^.]+(?={_LEAF.pattern}|$)")
    found: dict[str, str] = {}
    for name in names:
        plain = without_wrappers(name)
        plain = plain.removeprefix(_PARALLEL) if plain.startswith(_PARALLEL + PREFIX) else plain
        saved = named.sub(r"\1", plain)
        if saved != plain:
            saved = saved.replace(".modules_to_save.", ".")
            short = saved.removesuffix(".weight")  # PEFT saves DoRA's magnitudes without it
            saved = short if short.endswith((*ends,)) else saved
        found[name] = saved
    return found


def read_names(
    stored: Mapping[str, TensorHeader],
    config: AdapterConfig | None,
    where: str,
    of_parts: Mapping[str, AdapterConfig] | None = None,
) -> Contents:
    """Sort the tensors of an adapter into updates and whole tensors.

    Without a configuration its scales are 1 or stored as alpha, or those of `of_parts`: the configurations
    of the parts of a pipeline, by their prefixes.

    Raises:
        CheckpointError: the meaning of a tensor is not known, one tensor of a pair is missing, or
            shapes contradict each other or the configuration.
    """
    modules: dict[str, dict[str, TensorHeader]] = {}
    replaced: dict[str, str] = {}
    kind = None if config is None else config.kind
    shared: dict[str, TensorHeader] = {}
    for name, header in stored.items():
        if kind is not None and (part := kind.shared_part(name)):
            shared[part] = header
            continue
        if config is not None and (
            _OF_TRAINING.search(name) or (_COPIES.search(name) and _COPIES.sub("", name) in stored)
        ):
            continue
        module, part = _split(name, stored, config, where)
        if part:
            found = modules.setdefault(module, {})
            if part in found:
                raise CheckpointError(
                    f"{where} has both '{found[part].name}' and '{name}': remove one"
                )
            found[part] = header
        elif replaced.setdefault(_base_name(module), name) != name:
            raise CheckpointError(
                f"{where} has both '{replaced[_base_name(module)]}' and '{name}' for "
                f"'{_base_name(module)}': remove one"
            )
    if config is not None:
        config.expect({_unwrapped(module.removesuffix(_OUT_PROJ)) for module in modules})
    reader = _Reader(config, where, modules, of_parts or {})
    updates: dict[str, Update] = {}
    wrapped: dict[str, Wrapped] = {}
    folded: dict[str, Folded] = {}
    for module, parts in modules.items():
        if (difference := parts.pop(OF_BIAS, None)) is not None:
            bias, shape = f"{module}.bias", (difference.numel, 1)
            folded[bias] = Folded(bias, module, DIFF, {DIFFERENCE: difference}, shape)
        if not parts:
            continue
        if (layer := reader.folded(module, parts, shared)) is not None:
            folded[layer.name] = layer
        elif (found := reader.wrapped(module, parts)) is not None:
            wrapped[module] = found
        else:
            updates |= {update.name: update for update in reader.updates(module, parts)}
    if not updates and not replaced and not wrapped and not folded:
        raise CheckpointError(f"{where} holds no tensors: the file is incomplete, fetch it again")
    if twice := folded.keys() & updates.keys():
        raise CheckpointError(
            f"{where} changes '{min(twice)}' in two ways, with '{folded[min(twice)].up}' and by other "
            f"tensors: {MERGE_FIRST}"
        )
    return Contents(updates, replaced, wrapped, folded)


def oriented(update: Update, conv1d: Container[str]) -> Update:
    """Return a layer's update in the orientation of the base, whatever the configuration says.

    PEFT decides by the module's class; its `fan_in_fan_out` is that of the last layer it visited.
    """
    layer = update.down is not None and update.stack is None and not update.table
    transposed = update.name in conv1d
    if not layer or not update.name.endswith(".weight") or update.transposed == transposed:
        return update
    rows, columns = update.shape
    return replace(update, transposed=transposed, shape=(columns, rows))


def _ends(config: AdapterConfig) -> Mapping[str, str]:
    """Return the ends of LoRA's and AdaLoRA's names, each with its part."""
    return _ADALORA_PARTS if config.is_adalora else _PARTS


def _split(
    name: str, stored: Container[str], config: AdapterConfig | None, where: str
) -> tuple[str, str]:
    """Return a tensor's module and part; for a whole tensor, its own name and no part."""
    module = without_wrappers(name).removeprefix(PREFIX)
    table = _FILE_PARTS if config is None else _ends(config)
    if config is not None and (kind := config.kind) is not None:
        table = kind.ends
        for end, leaf in kind.whole.items():
            if module.endswith(end):
                return module.removesuffix(end) + leaf, ""
    for end, part in table.items():
        if module.endswith(end):
            stem = module.removesuffix(end)
            # diffusers' former attention processors have the factors of the layers beside them.
            return stem.replace(".processor.", ".") if end.startswith("_") else stem, part
    if config is None and (found := _beside(name, stored)) is not None:
        return found
    if (_OWN.search(module) and _RESIZED not in module) or (config is None and module == name):
        _refuse_tensor(name, config, where)
    return module, ""


def _beside(name: str, stored: Container[str]) -> tuple[str, str] | None:
    """Return the module and part of a tensor that is a part only because of another tensor beside it."""
    for kind in OF_FILES:
        for end, part in kind.beside.items():
            stem = name.removesuffix(end)
            if stem != name and any(f"{stem}{mark}" in stored for mark in kind.ends):
                return stem, part
    return None


def _refuse_tensor(name: str, config: AdapterConfig | None, where: str) -> NoReturn:
    if name.endswith(MLX_ENDS):
        raise CheckpointError(
            f"{where}: '{name}' is a factor of mlx-lm, whose scale is in adapter_config.json: put that and "
            f"this file, called {MLX_NAME}, into one folder, and pass the folder"
        )
    kind = "of no kind that is read"
    if any(mark in name for mark in _OF_TLORA):
        kind = "of T-LoRA, which begins as singular vectors that the file has not"
    step = MERGE_FIRST if config is not None else _MERGE_FILE_FIRST
    raise CheckpointError(f"{where}: '{name}' is {kind}, not a factor of LoRA: {step}")


def _base_name(module: str) -> str:
    parts = module.replace(_RESIZED, ".").split(".")
    return ".".join(part for part in parts if part != "base_layer")


def _unwrapped(module: str) -> str:
    """Return the module inside PEFT's wrappers; PEFT adds one for each parameter that it adapts."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _dtype_of(down: TensorHeader, up: TensorHeader) -> torch.dtype:
    return down.dtype if down.dtype == up.dtype else computed_in(down.dtype, up.dtype)


class _Reader:
    """Makes updates from the parts of modules."""

    def __init__(
        self,
        config: AdapterConfig | None,
        where: str,
        modules: Mapping[str, _Parts],
        of_parts: Mapping[str, AdapterConfig],
    ) -> None:
        self._of_parts = of_parts
        self._config = config
        self._where = where
        self._modules = modules
        ends = [(parts.get("table_down"), parts.get("table_up")) for parts in modules.values()]
        self._tables = {(a.shape, b.shape) for a, b in ends if a and b}
        self._attention = {
            module.removesuffix(_OUT_PROJ) for module in modules if module.endswith(_OUT_PROJ)
        }

    def folded(self, module: str, parts: _Parts, shared: _Parts) -> Folded | None:
        """Return a module's layer if its update is not a product of stored factors, else None."""
        config, owner = self._configured(_unwrapped(module))
        kind = self._kind(parts, config)
        if kind is None:
            return None
        name = f"{_unwrapped(module)}.{kind.leaf}"
        if self._config is not None and kind is not TRAINABLE_TOKENS:
            if self._config.parameters(owner):
                self._config.refuse("target_parameters", f"and {kind.name} is read of layers alone")
            self._check_target(module, owner)
        table = "table_down" in parts or "table_up" in parts
        names = {"table_down": "down", "table_up": "up"}
        found = {names.get(part, part): header for part, header in parts.items()}
        shapes = {part: header.shape for part, header in found.items()}
        matrix = None if kind.matrix is None else kind.matrix(shapes)
        of_layer = {**kind.of_layer(owner, shared), **found}
        return Folded(name, owner, kind, of_layer, matrix, table, config=config)

    def _configured(self, module: str) -> tuple[AdapterConfig | None, str]:
        """Return a module's configuration, and the module's name in that configuration."""
        for part, config in self._of_parts.items():
            if module.startswith(part):
                return config, module.removeprefix(part)
        return self._config, module

    def _kind(self, parts: _Parts, config: AdapterConfig | None) -> AdapterType | None:
        """Return the type of a layer; None: plain LoRA."""
        if config is not None and config.kind is not None:
            return config.kind
        if TOKENS in parts:
            if len(parts) > 1:
                self._refuse_shape(parts[TOKENS], "beside factors of the same module")
            return TRAINABLE_TOKENS
        wants = config is not None and bool(config.fields.get("use_dora"))
        if config is not None and wants != (MAGNITUDE in parts):
            have = next(iter(parts.values())).name
            raise CheckpointError(
                f"{self._where} has '{have}' with{'out' if wants else ''} a magnitude, and use_dora = "
                f"{str(wants).lower()} in its configuration: the files are of different versions, fetch "
                "them again"
            )
        return kind_of(parts, {} if config is None else config.fields)

    def wrapped(self, module: str, parts: _Parts) -> Wrapped | None:
        """Return the factors if their parameter must be looked up in the base, else None."""
        owner = _unwrapped(module)
        names = self._config.parameters(owner) if self._config else ()
        if self._config is None or not names or not {"down", "up"} <= parts.keys():
            return None
        for part in parts.keys() - {"down", "up"}:
            self._refuse_shape(parts[part], "which PEFT has for no parameter")
        down, up = parts["down"], parts["up"]
        terms, d_out, d_in = self._sizes(down, up, rows=True)
        nested = module != owner or f"{module}.base_layer" in self._modules
        if not nested and len(names) == 1 and terms == self._config.rank(f"{owner}.{names[0]}"):
            return None  # the module has one matrix, so there is no choice
        dtype = _dtype_of(down, up)
        return Wrapped(owner, names, (d_out, d_in), terms, dtype, up.name, down.name)

    def updates(self, module: str, parts: _Parts) -> list[Update]:
        """Return the update of a module's weight, and of its bias if it has one."""
        table = "table_down" in parts or "table_up" in parts
        ends = ("table_down", "table_up") if table else ("down", "up")
        for part, other in (ends, ends[::-1]):
            if part not in parts:
                have = parts.get(other, next(iter(parts.values()))).name
                raise CheckpointError(
                    f"{self._where} has '{have}' and not the factor that belongs to it: the file "
                    "is incomplete, fetch it again"
                )
        down, up = parts[ends[0]], parts[ends[1]]
        rank, d_out, d_in = self._sizes(down, up, rows=table)
        target, weight = self._target(module)
        # PEFT's flag holds for all layers stored as (d_in, d_out), but not for convolutions.
        flat = len(down.shape) == 2
        turned = flat and self._config is not None and self._config.transposed
        transposed = table or turned
        scale = self._scale(target, rank, parts)
        update = Update(
            name=weight,
            shape=(d_in, d_out) if transposed else (d_out, d_in),
            rank=rank,
            dtype=_dtype_of(down, up),
            up=up.name,
            down=down.name,
            # PEFT adds the update of an attention's out_proj twice, in training and when it merges.
            scale=2 * scale if module.endswith(_OUT_PROJ) else scale,
            transposed=transposed,
            table=table,
            middle=self._middle(parts, rank),
            alpha=self._number(parts.get("alpha")),
            divisor=self._number(parts.get("divisor")),
        )
        return [update, *self._bias(update, module, parts, d_out)]

    def _sizes(
        self, first: TensorHeader, second: TensorHeader, *, rows: bool
    ) -> tuple[int, int, int]:
        for header in (first, second):
            if len(header.shape) < 2 or not header.dtype.is_floating_point:
                self._refuse_shape(header, "which is no matrix of floating numbers")
        rank, d_out = first.shape[0], second.shape[0]
        # DyLoRA's B has no window, even beside the A of a convolution.
        fits = len(second.shape) in (2, len(first.shape)) and second.shape[1] == rank
        if is_grouped(rank, second.shape):
            raise CheckpointError(f"{self._where}: the layer of '{second.name}' {OF_GROUPS}")
        if not fits or any(size != 1 for size in second.shape[2:]):
            other = f"'{first.name}' of shape {list(first.shape)}"
            self._refuse_shape(second, f"which does not fit {other}")
        d_in = first.numel // rank if rank else first.shape[1]
        empty = rank == 0 and not (self._config is not None and self._config.is_adalora)
        if empty or d_out == 0 or d_in == 0 or (rows and len(first.shape) != 2):
            self._refuse_shape(first, "as the parts of a sharded model are")
        return rank, d_out, d_in

    def _target(self, module: str) -> tuple[str, str]:
        """Return a module's name in the configuration, and the name of its weight."""
        inner = module.removesuffix(_OUT_PROJ)
        owner = inner if inner in self._attention else module
        parameters = self._config.parameters(owner) if self._config else ()
        if "base_layer" in owner.split("."):
            raise CheckpointError(
                f"{self._where}: '{owner}' is wrapped twice, and what is inside is not known: "
                f"{MERGE_FIRST}"
            )
        if parameters:
            return f"{owner}.{parameters[0]}", f"{owner}.{parameters[0]}"
        self._check_target(module, owner)
        if owner in self._attention:
            return owner, f"{owner}.{'in_proj_weight' if owner == module else 'out_proj.weight'}"
        return owner, f"{owner}.weight"

    def _check_target(self, module: str, owner: str) -> None:
        if self._config is not None and not (self._config.tied and self._is_of_table(module)):
            self._config.check_target(owner)

    def _is_of_table(self, module: str) -> bool:
        """Return whether a module is an embedding or has one's transposed factors, `(r, n)`, `(d, r)`."""
        parts = self._modules[module]
        if "table_down" in parts:
            return True
        if not {"down", "up"} <= parts.keys():
            return False
        down, up = parts["down"].shape, parts["up"].shape
        return (up[::-1], down[::-1]) in self._tables

    def _scale(self, module: str, rank: int, parts: _Parts) -> float:
        config, name = self._configured(module)
        if config is None:
            return 1.0 / rank if "alpha" in parts else 1.0
        scale = config.scale(name, rank)
        if config.is_adalora and "divisor" not in parts:
            return scale / config.rank_divisor
        return scale

    def _middle(self, parts: _Parts, rank: int) -> str | None:
        if self._config is None or not self._config.is_adalora:
            return None
        if "middle" not in parts:
            raise CheckpointError(
                f"{self._where} has '{parts['down'].name}' and no lora_E beside it: the file is "
                "incomplete, fetch it again"
            )
        header = parts["middle"]
        if header.numel != rank or not header.dtype.is_floating_point:
            self._refuse_shape(header, f"which are not {rank} floating numbers")
        return header.name

    def _number(self, header: TensorHeader | None) -> str | None:
        if header is not None and header.numel != 1:
            self._refuse_shape(header, "which is not one number")
        return header and header.name

    def _bias(self, weight: Update, module: str, parts: _Parts, d_out: int) -> list[Update]:
        if "bias" not in parts:
            return []
        header = parts["bias"]
        if weight.name != f"{module}.weight":
            self._refuse_shape(header, "which PEFT leaves aside in nn.MultiheadAttention")
        if header.shape != (d_out,) or not header.dtype.is_floating_point:
            self._refuse_shape(header, f"which are not {d_out} floating numbers")
        bias = Update(
            name=f"{module}.bias",
            shape=(d_out, 1),
            rank=1,
            dtype=header.dtype,
            up=header.name,
            down=None,
            scale=weight.scale,
            alpha=weight.alpha,
        )
        return [bias]

    def _refuse_shape(self, header: TensorHeader, why: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: '{header.name}' is {header.dtype} of shape {list(header.shape)}, "
            f"{why}: fetch it again, or save the adapter again from gathered weights"
        )
