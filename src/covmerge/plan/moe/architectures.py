"""The mixture-of-experts architectures that dense models can become: one entry each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covmerge.base.errors import InputError

EMBEDDING = "model.embed_tokens.weight"
MLP = re.compile(r"(?P<layer>model\.layers\.\d+)\.mlp\.(?P<part>\w+)\.weight")


SHARED = -1  # stands for a routed expert's number


@dataclass(frozen=True)
class Architecture:
    """A mixture-of-experts architecture."""

    # Model types of the dense models that it can hold, each with config fields that must not be
    # set, because the mixture has no counterpart.
    bases: Mapping[str, tuple[str, ...]]
    block: str  # name of the mixture in its layers
    parts: Mapping[str, str]  # for each matrix of a dense MLP, its name in an expert
    settings: Mapping[str, Any]  # fields of config.json in addition to the base's
    count: str  # its key for the number of experts
    widths: tuple[str, ...] = ("intermediate_size",)  # its keys for the width of an expert
    dropped: tuple[str, ...] = ()  # fields of the base's config that it does not have
    # Name of the norm before a layer's MLP; None: there is none.
    norm: str | None = "post_attention_layernorm"
    # Name of the vector, here zero, that its blocks add to the router's scores before choosing
    # experts.
    bias: str | None = None
    # Name in its blocks of the expert for every token; None: there is none.
    shared: str | None = None
    # Name of this expert's gate, whose sigmoid is its weight; None: it is added unweighted.
    shared_gate: str | None = None

    def gate(self, layer: str) -> str:
        return f"{layer}.{self.block}.gate.weight"

    def is_gate(self, name: str) -> bool:
        return name.endswith(f".{self.block}.gate.weight")

    def is_shared_gate(self, name: str) -> bool:
        return self.shared_gate is not None and name.endswith(f".{self.block}.{self.shared_gate}")

    def expert(self, layer: str, index: int, part: str) -> str:
        """Return the name of a matrix of an expert, given by its number or SHARED."""
        own = self.shared if index == SHARED else f"experts.{index}"
        return f"{layer}.{self.block}.{own}.{self.parts[part]}.weight"

    def of_base(self, name: str) -> str | None:
        """Return what a tensor is if it is created with the base and not merged, such as "a router"."""
        if self.is_gate(name):
            return "a router"
        if self.bias is not None and name.endswith(f".{self.block}.{self.bias}"):
            return "what a router adds"
        return "the gate of the shared expert" if self.is_shared_gate(name) else None

    def index(self, name: str) -> int | None:
        """Return the number of the expert that a tensor of the mixture belongs to, SHARED, or None."""
        found = re.search(rf"\.{self.block}\.experts\.(\d+)\.", name)
        if found is not None:
            return int(found[1])
        shared = self.shared is not None and f".{self.block}.{self.shared}." in name
        return SHARED if shared else None

    def config(self, base: Mapping[str, Any], experts: int, per_token: int) -> dict[str, Any]:
        """Return config.json of the mixture."""
        kind = str(base.get("model_type"))
        if kind not in self.bases:
            bases = " or ".join(self.bases)
            said = f"the base is of the architecture {kind!r}, and this mixture is made of {bases}"
            right = [name for name, other in ARCHITECTURES.items() if kind in other.bases]
            if right:
                raise InputError(f"{said}: write `architecture: {right[0]}` under moe")
            raise InputError(f"{said}: choose a base of one of them")
        copied = _said(base) | {
            key: value
            for key, value in base.items()
            if not (key in ("num_key_value_heads", "head_dim") and value is None)
        }
        for key in self.bases[kind]:
            if copied.get(key):
                own = self.settings["model_type"]
                raise InputError(
                    f"the base's config.json says {key}, which {own} has not: choose a base without"
                )
        kept = {key: value for key, value in copied.items() if key not in self.dropped}
        sizes = dict.fromkeys(self.widths, copied["intermediate_size"])
        counts = {self.count: experts, "num_experts_per_tok": per_token}
        return {**kept, **self.settings, **sizes, **counts}


# transformers' defaults for fields missing in a dense config; for a mixture it has other defaults.
_ASSUMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "sliding_window": None,
            "qkv_bias": False,
        },
        "mistral": {
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "qkv_bias": False,
        },
        "qwen2": {
            "intermediate_size": 22016,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
        },
        "qwen3": {
            "intermediate_size": 22016,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        "olmo2": {
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
        "youtu": {
            "intermediate_size": 6144,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
        },
    }
)


def _said(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of fields that a dense config omits and that have other defaults in the mixture."""
    found: dict[str, Any] = {"rms_norm_eps": 1e-6, **_ASSUMED[str(base["model_type"])]}
    if base.get("num_key_value_heads", found.get("num_key_value_heads")) is None:
        found["num_key_value_heads"] = base.get("num_attention_heads", 32)
    if "rope_parameters" not in base:
        found["rope_theta"] = 10000.0
    return found


_SAME = MappingProxyType({part: part for part in ("gate_proj", "down_proj", "up_proj")})
_BIASES = ("attention_bias", "mlp_bias")
# For the Qwens, which can also have dense layers, and weights that do not add up to 1.
_EVERY_LAYER: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mixtral": Architecture(
            bases={"llama": _BIASES, "mistral": ()},
            block="block_sparse_moe",
            parts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
            settings={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
            count="num_local_experts",
            dropped=(*_BIASES, "pretraining_tp", "qkv_bias"),
        ),
        "qwen2_moe": Architecture(
            bases={
                "qwen2": ("use_sliding_window",),
                "llama": _BIASES,
                "mistral": ("sliding_window",),
            },
            block="mlp",
            parts=_SAME,
            settings=_EVERY_LAYER
            | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
            count="num_experts",
            widths=("moe_intermediate_size", "shared_expert_intermediate_size"),
            dropped=(*_BIASES, "pretraining_tp"),
            shared="shared_expert",
            shared_gate="shared_expert_gate.weight",
        ),
        "qwen3_moe": Architecture(
            bases={"qwen3": ("use_sliding_window",)},
            block="mlp",
            parts=_SAME,
            settings=_EVERY_LAYER
            | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            count="num_experts",
            widths=("moe_intermediate_size",),
            dropped=("layer_types", "max_window_layers"),
        ),
        "flex_olmo": Architecture(
            bases={"olmo2": ()},
            block="mlp",
            parts=_SAME,
            settings={
                "model_type": "flex_olmo",
                "architectures": ["FlexOlmoForCausalLM"],
                "norm_topk_prob": True,
            },
            count="num_experts",
            norm=None,
        ),
        "deepseek_v3": Architecture(
            bases={"youtu": ()},
            block="mlp",
            parts=_SAME,
            # One group of experts, a mixture in every layer, and no layers that predict further tokens.
            settings={
                "model_type": "deepseek_v3",
                "architectures": ["DeepseekV3ForCausalLM"],
                "first_k_dense_replace": 0,
                "moe_layer_freq": 1,
                "n_group": 1,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_nextn_predict_layers": 0,
                "routed_scaling_factor": 1.0,
                "scoring_func": "sigmoid",
                "topk_group": 1,
                "topk_method": "noaux_tc",
            },
            count="n_routed_experts",
            widths=("moe_intermediate_size",),
            dropped=("embedding_initializer_range",),
            bias="gate.e_score_correction_bias",
            shared="shared_experts",
        ),
    }
)
# Why dense models cannot become these architectures, and which one to choose instead.
FORMLESS: Mapping[str, str] = MappingProxyType(
    {
        "olmoe": "it norms q and k over all heads, and what attention and MLP read, as no dense model "
        "does: write flex_olmo, with an OLMo 2 base",
        "deepseek_v2": "in transformers the weights of a token's experts do not add up to 1 there: write "
        "deepseek_v3, with a Youtu base",
        "deepseek": "transformers has it in no release: write qwen2_moe, with a Llama base and a shared "
        "expert, or mixtral without one",
    }
)
