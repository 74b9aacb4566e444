"""Known fused projections: weights whose rows belong to several projections.

What is not listed here stays whole: a wrong split would merge rows of different meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from covmerge.files.tensors.views import FusedParts

_QKV = ("q", "k", "v")
_Split = Callable[[Any, int], FusedParts | None]


def equal_parts(names: Sequence[str], d_out: int) -> FusedParts | None:
    """Split rows into equal runs, one after another; None where they do not divide.

    Example:
        >>> equal_parts(("gate", "up"), 10)
        FusedParts(names=('gate', 'up'), sizes=(5, 5), groups=1)
    """
    size, rest = divmod(d_out, len(names))
    return None if rest else FusedParts(tuple(names), (size,) * len(names))


def known_parts(path: str, module: nn.Module, config: Any, d_out: int) -> FusedParts | None:
    """Return the parts of a module's own weight, if it is a fused projection known to covmerge.

    Args:
        path: dotted name of the weight in the model.
        module: the module that owns it.
        config: transformers config of the nearest enclosing model.
        d_out: rows of the oriented weight.
    """
    parts = _split(path, module, config, d_out)
    # A config that contradicts the weight's shape says nothing about its rows.
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
    """Gate and up rows of packed experts: halves, or alternating (GPT-OSS)."""
    if type(module).__name__ == "Llama4TextExperts":  # its class does not say; forward: chunk(2)
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
    """(heads, 3, head_dim): q, k and v of one head after another."""
    heads = config.num_attention_heads
    return FusedParts(_QKV, (d_out // (3 * heads),) * 3, groups=heads)


def _grouped_query(config: Any, d_out: int) -> FusedParts:
    """All of q, then all of k, then all of v, with fewer heads in k and v."""
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


# (model types, where in the model, how the rows split), each read off the model's forward.
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
