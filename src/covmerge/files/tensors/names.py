"""The role of a tensor by its name, for checkpoints without a config (open_clip, diffusers, timm).

The first rule that matches decides. A rule looks at the name and the number of axes. Two facts that a
name does not show (GPT-2's transposed layers, the orientation of a stack of experts) are taken from the
shapes of tensors that belong together. A tensor without a rule is `other`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.modules import Kind, equal_parts
from covmerge.files.tensors.views import FusedParts

# The layers of a stack: the layer to which a tensor belongs, by its name, and the layer's depth.

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LayerName:
    """The name of a tensor in one of a stack of layers, split at its first number."""

    stack: str  # the text before the number, which is the same for all layers of the stack
    index: int
    rest: str  # the text after the number, which is the same in all layers

    def at(self, index: int) -> str:
        """Return the name of the corresponding tensor in another layer."""
        return f"{self.stack}{index}{self.rest}"


def layer_name(name: str) -> LayerName | None:
    """Split a name at its layer's number; return None if it belongs to no layer.

    Example:
        >>> layer_name("model.layers.11.mlp.experts.3.up.weight")
        LayerName(stack='model.layers.', index=11, rest='.mlp.experts.3.up.weight')
    """
    found = _NUMBER.search(name)
    return found and LayerName(name[: found.start(1)], int(found[1]), name[found.end(1) :])


def in_rows_of_blocks(names: Iterable[str]) -> frozenset[str]:
    """Return the tensors of complete sequences of blocks, whose numbers begin at 0 without gaps.

    A sequence with gaps is not one of blocks but a few layers, a head or a projection:
    `torch.nn.Sequential` also counts modules without weights.

    Example:
        >>> names = ["h.0.fc", "h.1.fc", "classifier.1.weight", "mlp.0.weight", "mlp.2.weight", "norm"]
        >>> sorted(in_rows_of_blocks(names))
        ['h.0.fc', 'h.1.fc']
    """
    found = {name: layer for name in names if (layer := layer_name(name)) is not None}
    numbers: dict[str, set[int]] = {}
    for layer in found.values():
        numbers.setdefault(layer.stack, set()).add(layer.index)
    return frozenset(
        name
        for name, layer in found.items()
        if max(numbers[layer.stack]) + 1 == len(numbers[layer.stack])
    )


def relative_depth(index: int, count: int) -> float:
    """Return the relative depth t = i/(L − 1) of layer i of L; 1 for a single layer."""
    return index / (count - 1) if count > 1 else 1.0


def relative_depths(names: Iterable[str]) -> dict[str, float]:
    """Return the relative depth of each tensor in its stack of layers; 0 outside all stacks.

    Example:
        >>> relative_depths(["wte", "h.0.fc", "h.1.fc", "h.2.fc", "ln_f"])
        {'wte': 0.0, 'h.0.fc': 0.0, 'h.1.fc': 0.5, 'h.2.fc': 1.0, 'ln_f': 0.0}
    """
    found = {name: layer_name(name) for name in names}
    counts: dict[str, int] = {}
    for layer in found.values():
        if layer is not None:
            counts[layer.stack] = max(counts.get(layer.stack, 0), layer.index + 1)
    return {
        name: 0.0 if layer is None else relative_depth(layer.index, counts[layer.stack])
        for name, layer in found.items()
    }


_Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class NameRule:
    """A rule that gives a role to tensors whose name matches and that have one of these numbers of axes."""

    label: str  # the reason that a user reads
    pattern: str  # regular expression, searched in the dotted name
    role: Role
    axes: range  # allowed numbers of axes
    transposed: bool = False  # whether the matrix is stored as `(d_in, d_out)`
    # A condition on the other tensors; None: there is none.
    when: Callable[[str, _Headers], bool] | None = None
    rebuilt: bool = False  # whether the tensor is a buffer that the model's code creates again

    def matches(self, header: TensorHeader, headers: _Headers) -> bool:
        """Return whether the rule decides about this tensor."""
        return (
            len(header.shape) in self.axes
            and re.search(self.pattern, header.name, re.IGNORECASE) is not None
            and (self.when is None or self.when(header.name, headers))
        )


def _in_conv1d_block(name: str, headers: _Headers) -> bool:
    """Return whether the block's `attn.c_attn` is `(d, 3d)`, as in OpenAI's GPT-2 with transposed layers.

    open_clip and nanoGPT use the same names for linear layers that are stored `(d_out, d_in)`.
    """
    block = re.split(r"(?:^|(?<=\.))(?:attn|crossattention|mlp)\.", name)[0]
    fused = headers.get(f"{block}attn.c_attn.weight")
    return fused is not None and len(fused.shape) == 2 and fused.shape[1] == 3 * fused.shape[0]


def _has_vocabulary(name: str, headers: _Headers) -> bool:
    """Return whether a root-level `head` is as large as a token embedding, and so is no classifier."""
    return any(
        header.shape == headers[name].shape and re.search(_TOKEN_EMBEDDING, other)
        for other, header in headers.items()
    )


def _packed_experts_lie(transposed: bool) -> Callable[[str, _Headers], bool]:
    """Return a condition for the orientation of packed experts, from gate-and-up beside down.

    Stored for F.linear they are (E, 2f, d) and (E, d, f), otherwise (E, d, 2f) and (E, f, d). No shapes fit
    both.
    """

    def condition(name: str, headers: _Headers) -> bool:
        stem = re.sub(r"(gate_up|down)_proj(\.weight)?$", "", name)
        leaf = ".weight" if name.endswith(".weight") else ""
        up, down = (headers.get(f"{stem}{part}_proj{leaf}") for part in ("gate_up", "down"))
        if up is None or down is None or not len(up.shape) == len(down.shape) == 3:
            return False
        (_, up_out, up_in), (_, down_out, down_in) = up.shape, down.shape
        if transposed:
            up_out, up_in, down_out, down_in = up_in, up_out, down_in, down_out
        return up_out == 2 * down_in and up_in == down_out

    return condition


_TOKEN_EMBEDDING = r"(^|\.)(emb|wte|token_embedding|tok_embeddings|embed_tokens|word_embeddings)\."
_NORM = r"(ln|ln_[^.]*|ln\d+|[^.]*_ln|bn|bn\d+|[^.]*_bn|[^.]*norm[^.]*)"
_EMBEDDING = (
    r"emb|emb_layer|wte|wpe|tok_embeddings|shared|relative_attention_bias|([^.]*_)?embeddings?|"
    r"embed_(tokens|positions|in)[^.]*"
)
_PACKED = r"experts\.(gate_up|down)_proj(\.weight)?"
_CONV1D = r"(attn\.c_(attn|proj)|crossattention\.(c_attn|q_attn|c_proj)|mlp\.c_(fc|proj))"
_UP_TO_VECTOR, _UP_TO_MATRIX, _MATRIX = range(2), range(3), range(2, 3)
_STACK, _ATLEAST_3, _ATLEAST_4 = range(3, 4), range(3, 6), range(4, 6)
_ANY = range(64)

RULES = (
    NameRule("statistics", r"\.(num_batches_tracked|running_mean|running_var)$", Role.BUFFER, _ANY),
    NameRule(
        "buffer",
        r"(^|\.)(inv_freq|position_ids|attn_mask|masked_bias)$",
        Role.BUFFER,
        _ANY,
        rebuilt=True,
    ),
    NameRule(
        "causal mask", r"(^|\.)(attn|attention)\.bias$", Role.BUFFER, _ATLEAST_3, rebuilt=True
    ),
    NameRule("norm", rf"(^|\.){_NORM}\.(weight|bias|gamma|beta|scale)$", Role.NORM, _UP_TO_VECTOR),
    NameRule("bias", r"(^|[._])bias$", Role.BIAS, _UP_TO_MATRIX),
    NameRule(
        "output",
        r"(^|\.)(lm_head(\.decoder)?|predictions\.decoder|embed_out)\.weight$",
        Role.OUTPUT,
        _MATRIX,
    ),
    NameRule(
        "output like the token embedding",
        r"^(model\.)?(output|head)\.weight$",
        Role.OUTPUT,
        _MATRIX,
        when=_has_vocabulary,
    ),
    NameRule("embedding", rf"(^|\.)({_EMBEDDING})\.weight$", Role.EMBEDDING, _MATRIX),
    NameRule("positional_embedding", r"(^|\.)positional_embedding$", Role.EMBEDDING, _MATRIX),
    # open_clip's bare (d_in, d_out) projections, which the papers average
    NameRule("projection", r"^(text\.)?text_projection$|^visual\.proj$", Role.OTHER, _MATRIX),
    NameRule("kernel", r"\.weight$", Role.CONV, _ATLEAST_4),
    NameRule("conv", r"conv[^.]*(\.\d+)?\.weight$", Role.CONV, _ATLEAST_3),
    NameRule(
        "packed experts",
        rf"(^|\.){_PACKED}$",
        Role.EXPERT_STACK,
        _STACK,
        when=_packed_experts_lie(transposed=False),
    ),
    NameRule(
        "packed experts, transposed",
        rf"(^|\.){_PACKED}$",
        Role.EXPERT_STACK,
        _STACK,
        transposed=True,
        when=_packed_experts_lie(transposed=True),
    ),
    NameRule(
        "GPT-2 block with (d, 3d) c_attn",
        rf"(^|\.){_CONV1D}\.weight$",
        Role.CONV1D,
        _MATRIX,
        transposed=True,
        when=_in_conv1d_block,
    ),
    NameRule("attention projection", r"(^|\.)(in|q|k|v)_proj_weight$", Role.LINEAR, _MATRIX),
    NameRule("2-D weight", r"\.weight$", Role.LINEAR, _MATRIX),
)
_HEAD = re.compile(
    r"^(model\.)?(lm_head|embed_out|head|heads|fc|output|classifier|classification_head|score|"
    r"qa_outputs|cls)\."
)


def kind_by_name(header: TensorHeader, headers: _Headers) -> Kind:
    """Return the role of a tensor by the first rule that matches.

    Example:
        >>> import torch
        >>> names = {"ln_1.weight": (8,), "mlp.c_fc.weight": (32, 8)}
        >>> headers = {n: TensorHeader(n, shape, torch.float32) for n, shape in names.items()}
        >>> [str(kind_by_name(h, headers).role) for h in headers.values()]
        ['norm', 'linear']
    """
    for rule in RULES:
        if rule.matches(header, headers):
            why = f"name rule '{rule.label}'"
            return Kind(rule.role, why, rule.transposed, rebuilt=rule.rebuilt)
    if len(header.shape) == 3 and ".experts." in f".{header.name}":
        why = "stack of experts by its name, whose orientation the name does not tell"
        return Kind(Role.OTHER, why, unsure=True)
    return Kind(Role.OTHER, "no name rule")


def parts_by_name(header: TensorHeader, kind: Kind) -> FusedParts | None:
    """Return the split into q, k and v of a fused projection `(3d, d)` that is known by its name.

    The three parts must be square, because a model with fewer key than query heads would split elsewhere.
    """
    fused = re.search(r"(^|\.)(attn\.c_attn\.weight|in_proj_weight|qkv\.weight)$", header.name)
    if fused is None or kind.role not in (Role.LINEAR, Role.CONV1D):
        return None
    d_out, d_in = reversed(header.shape) if kind.transposed else header.shape
    return equal_parts(("q", "k", "v"), d_out) if d_out == 3 * d_in else None


def find_name(name: str, prefixes: Sequence[str], stored: Collection[str]) -> str | None:
    """Return the name of a tensor in another model; None: the other model does not have it.

    `prefixes` are those that models of this kind put before the names of their base model.

    Example:
        >>> find_name("bert.pooler.weight", ["bert"], ["pooler.weight"])
        'pooler.weight'
    """
    candidates = [name]
    for prefix in prefixes:
        candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return next((c for c in candidates if c in stored), None)


def is_head_by_name(name: str) -> bool:
    """Return whether a name belongs to a task head or to a language model's output.

    Example:
        >>> is_head_by_name("classifier.weight"), is_head_by_name("encoder.classifier.weight")
        (True, False)
    """
    return _HEAD.match(name) is not None
