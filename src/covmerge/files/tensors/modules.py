"""The role of a module's own parameter, from the module's class."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import conv

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.views import FusedParts

# Known fused projections: weights whose rows belong to several projections.
#
# A projection that is not listed stays whole: a wrong split would merge rows of different meaning.

_QKV = ("q", "k", "v")
_Split = Callable[[Any, int], FusedParts | None]


def equal_parts(names: Sequence[str], d_out: int) -> FusedParts | None:
    """Split rows into equal runs, one after another; None if the number of rows is not divisible.

    Example:
        >>> equal_parts(("gate", "up"), 10)
        FusedParts(names=('gate', 'up'), sizes=(5, 5), groups=1)
    """
    size, rest = divmod(d_out, len(names))
    return None if rest else FusedParts(tuple(names), (size,) * len(names))


def known_parts(path: str, module: nn.Module, config: Any, d_out: int) -> FusedParts | None:
    """Return the parts of a module's own weight, if it is a fused projection known to covmerge.

    `path` is the weight's name in the model, and `config` that of the nearest enclosing model.
    """
    parts = _split(path, module, config, d_out)
    # A config that contradicts the weight's shape tells nothing about its rows.
    return parts if parts is not None and sum(parts.rows) == d_out else None


def _split(path: str, module: nn.Module, config: Any, d_out: int) -> FusedParts | None:
    leaf = path.rpartition(".")[2]
    if isinstance(module, nn.MultiheadAttention):
        return equal_parts(_QKV, d_out) if leaf == "in_proj_weight" else None
    if leaf == "gate_up_proj":
        return _packed_gate_up(module, d_out)
    for model_types, pattern, split in _PROJECTIONS:
        if getattr(config, "model_type", None) in model_types and pattern.search(path):
            return split(config, d_out)
    return None


def _packed_gate_up(module: nn.Module, d_out: int) -> FusedParts | None:
    """Return the gate and up rows of packed experts: two halves, or alternating rows (GPT-OSS)."""
    if type(module).__name__ == "Llama4TextExperts":  # not stated by the class; forward: chunk(2)
        return equal_parts(("gate", "up"), d_out)
    concatenated = getattr(module, "is_concatenated", None)
    if concatenated is None or not getattr(module, "has_gate", False):
        return None
    if concatenated:
        return equal_parts(("gate", "up"), d_out)
    return FusedParts(("gate", "up"), (1, 1), groups=d_out // 2)


def _equal(*names: str) -> _Split:
    return lambda config, d_out: equal_parts(names, d_out)


def _per_head(config: Any, d_out: int) -> FusedParts:
    """Split (heads, 3, head_dim): q, k and v of one head after another."""
    heads = config.num_attention_heads
    return FusedParts(_QKV, (d_out // (3 * heads),) * 3, groups=heads)


def _grouped_query(config: Any, d_out: int) -> FusedParts:
    """Split into all of q, then all of k, then all of v, with fewer heads in k and v."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = d_out // (heads + 2 * kv_heads)
    return FusedParts(_QKV, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


def _falcon(config: Any, d_out: int) -> FusedParts:
    heads = config.num_attention_heads
    if config.new_decoder_architecture:  # (kv_heads, q heads of this kv head + 2, head_dim)
        queries = heads // config.num_kv_heads
        head_dim = d_out // (config.num_kv_heads * (queries + 2))
        return FusedParts(_QKV, (queries * head_dim, head_dim, head_dim), config.num_kv_heads)
    if config.multi_query:  # all of q, then one k and one v head
        head_dim = d_out // (heads + 2)
        return FusedParts(_QKV, (heads * head_dim, head_dim, head_dim))
    return _per_head(config, d_out)


# (model types, pattern of paths, split of the rows), each taken from the model's forward.
_PROJECTIONS: tuple[tuple[tuple[str, ...], re.Pattern[str], _Split], ...] = tuple(
    (model_types, re.compile(pattern), split)
    for model_types, pattern, split in (
        (("gpt2",), r"\bcrossattention\.c_attn\.weight$", _equal("k", "v")),
        (("gpt2",), r"\battn\.c_attn\.weight$", _equal(*_QKV)),
        (("phi3",), r"\bqkv_proj\.weight$", _grouped_query),
        (("phi3", "glm", "glm4"), r"\bgate_up_proj\.weight$", _equal("gate", "up")),
        (("gpt_neox", "bloom"), r"\bquery_key_value\.weight$", _per_head),
        (("falcon",), r"\bquery_key_value\.weight$", _falcon),
        (("mpt", "modernbert"), r"\bWqkv\.weight$", _equal(*_QKV)),
        (("modernbert",), r"\bmlp\.Wi\.weight$", _equal("input", "gate")),
    )
)


# Stacks of expert matrices whose class does not state their orientation (`is_transposed`), taken from each
# class's forward: True is (experts, d_in, d_out), applied as x @ W; False is the order of F.linear.
_STACK_IS_TRANSPOSED = {
    "Llama4TextExperts": True,
    "InklingSharedExperts": False,
    "JetMoeParallelExperts": False,
    "LongcatFlashExperts": False,
    "Step3p7Experts": False,
}
# Subclasses of nn.Linear whose forward is nn.Linear's in other words.
_PLAIN_LINEAR = ("FalconLinear",)
# Routers have a bare 2-D `weight` and apply it by F.linear.
_ROUTER = re.compile(r"(Router|Gate)$")
_ATTENTION_MATRICES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Kind:
    """The role of a tensor, the reason, and the orientation that goes with it."""

    role: Role
    why: str  # the facts from which the role was concluded
    transposed: bool = False  # whether matrices are stored as `(d_in, d_out)`
    # Whether too little is known, so that the tensor is treated as `other`; users are told.
    unsure: bool = False
    # Whether it is the weight of a layer for which PEFT has factors. Subclasses of such layers are
    # excluded, because they may do more.
    takes_factors: bool = False
    # Whether transformers never quantises its module, as T5's `wo`, kept in float32.
    stays_full: bool = False
    # Whether it is a buffer that the model's code creates again at each loading, such as a mask.
    rebuilt: bool = False


def kind_of_parameter(module: nn.Module, leaf: str, parameter: Tensor, *, is_output: bool) -> Kind:
    """Return the role of the parameter `leaf` of a module, which may be the model's output embedding.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> kind = kind_of_parameter(layer, "weight", layer.weight, is_output=False)
        >>> str(kind.role), kind.why, kind.transposed
        ('linear', 'module class Linear', False)
    """
    name = type(module).__name__
    by_class = f"module class {name}"
    if leaf == "weight":
        exact = type(module) in (nn.Linear, nn.Embedding)
        if is_output:
            why = f"output embedding ({name})"
            return Kind(Role.OUTPUT, why, takes_factors=type(module) is nn.Linear)
        if isinstance(module, nn.Linear):
            plain = name in _PLAIN_LINEAR  # quantisers, which go by the class, leave it as it is
            return Kind(Role.LINEAR, by_class, takes_factors=exact or plain, stays_full=plain)
        if _is_conv1d(module):
            return Kind(Role.CONV1D, by_class, transposed=True, takes_factors=True)
        if isinstance(module, nn.Embedding):
            return Kind(Role.EMBEDDING, by_class, takes_factors=exact)
        if isinstance(module, conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            plain = type(module) is nn.Conv2d and module.groups == 1
            turned = isinstance(module, _CONV_TRANSPOSE)
            return Kind(Role.CONV, by_class, transposed=turned, takes_factors=plain)
        if _ROUTER.search(name) and parameter.ndim == 2:
            return Kind(Role.LINEAR, by_class)
    if "norm" in name.lower():
        return Kind(Role.NORM, by_class)
    if leaf == "bias" or leaf.endswith("_bias"):
        return Kind(Role.BIAS, f"{by_class}, parameter '{leaf}'")
    if isinstance(module, nn.MultiheadAttention) and leaf in _ATTENTION_MATRICES:
        return Kind(Role.LINEAR, f"{by_class}, parameter '{leaf}'")
    if parameter.ndim == 3:
        transposed = getattr(module, "is_transposed", _STACK_IS_TRANSPOSED.get(name))
        if transposed is not None:
            return Kind(Role.EXPERT_STACK, by_class, transposed=bool(transposed))
        if name.endswith("Experts"):
            why = f"stack of {name}, whose orientation covmerge does not know"
            return Kind(Role.OTHER, why, unsure=True)
    return Kind(Role.OTHER, f"parameter '{leaf}' of {name}")


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, without importing transformers."""
    return any(
        c.__name__ == "Conv1D" and c.__module__.startswith("transformers")
        for c in type(module).__mro__
    )


# The role of a stored tensor from which the loader makes a parameter of the model.
#
# Mostly the two are the same. But transformers may store each expert separately and pack all of them on
# loading (Mixtral), split a stored tensor, or transpose it. Its loader has a list of operations, from which
# the stored tensor's role and orientation follow.

MATRICES = (Role.LINEAR, Role.CONV1D, Role.EXPERT_STACK)
# Operations of transformers' loader that do not exchange rows and columns.
_KEEP_ORIENTATION = frozenset(
    {
        "Chunk",
        "Concatenate",
        "Conv3dToLinear",
        "ErnieFuseAndSplitTextVisionExperts",
        "Interleave",
        "LinearToConv3d",
        "MergeModulelist",
        "PermuteForRope",
        "Split",
        "SplitModulelist",
    }
)


@dataclass(frozen=True)
class Place:
    """A parameter or buffer of the model, or the place of a stored tensor in it."""

    # Dotted name of the parameter or buffer in the model. Several stored tensors have the same one
    # if the model packs them.
    parameter: str
    kind: Kind  # role and orientation of the stored tensor
    parts: FusedParts | None  # the split of a fused projection, if known
    # The shape according to the config; None if it is stored in other pieces.
    expected: tuple[int, ...] | None
    # Whether the loader makes several parameters of it; `parameter` is the first of them.
    divided: bool = False


def place_of(target: Place, header: TensorHeader, converter: Any | None) -> Place:
    """Return the place of a stored tensor, from its target in the model and the loader's converter."""
    if converter is None:
        parts = target.parts if header.shape == target.expected else None
        return replace(target, kind=_stored_kind(target, header, ()), parts=parts)
    operations: list[Any] = converter.operations
    kind = _stored_kind(target, header, operations)
    parts = None
    if [type(o).__name__ for o in operations] == ["Chunk"] and kind.role is Role.LINEAR:
        chunk = operations[0]
        if chunk.dim == 0 and chunk.num_shards_attribute is None and not kind.transposed:
            names = [
                p.removesuffix(".weight").rpartition(".")[2] for p in converter.target_patterns
            ]
            parts = equal_parts(names, header.shape[0])
    divided = len(converter.target_patterns) > 1
    return Place(target.parameter, kind, parts, None, divided)


def _stored_kind(target: Place, header: TensorHeader, operations: Sequence[Any]) -> Kind:
    """Return the kind of a stored tensor that the loader turns into (a part of) the target."""
    kind, axes, shape = target.kind, len(header.shape), target.expected or ()
    if not operations:
        if axes == len(shape) or kind.role is Role.BUFFER:
            return kind
        why = f"{kind.why}, but stored {list(header.shape)} instead of {list(shape)}"
        return Kind(Role.OTHER, why, unsure=True)
    transposed = kind.transposed
    for operation in operations:
        name = type(operation).__name__
        if name == "Transpose" and _swaps_matrix_axes(operation, len(shape)):
            if not (operation.check_dims and header.shape == shape):
                transposed = not transposed
        elif name not in _KEEP_ORIENTATION:
            why = f"{kind.why}, but stored for {operation}, which covmerge does not know"
            return Kind(Role.OTHER, why, unsure=True)
    piece_of = f"{kind.why}, converted on loading"
    if kind.role in MATRICES and axes >= 2:
        role = {2: Role.LINEAR, 3: Role.EXPERT_STACK}.get(axes, Role.CONV)
        return Kind(role, piece_of, transposed, stays_full=kind.stays_full)
    as_a_whole = kind.role in (Role.CONV, Role.EMBEDDING, Role.OUTPUT)
    if as_a_whole and (axes != len(shape) or transposed != kind.transposed):
        return Kind(Role.OTHER, f"{piece_of} from {list(header.shape)}", unsure=True)
    return Kind(kind.role, piece_of, kind.transposed)


def _swaps_matrix_axes(operation: Any, axes: int) -> bool:
    return {operation.dim0 % axes, operation.dim1 % axes} == {axes - 2, axes - 1}
