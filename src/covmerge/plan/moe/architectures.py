"""The mixture-of-experts architectures that dense experts can become: a row each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covmerge.base.errors import InputError

EMBEDDING = "model.embed_tokens.weight"
MLP = re.compile(r"(?P<layer>model\.layers\.\d+)\.mlp\.(?P<part>\w+)\.weight")


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        bases: model types of the dense models that it can hold.
        block: what its layers call the mixture.
        parts: by matrix of a dense MLP, its name in an expert.
        settings: what config.json says beside the base's.
        count: its key for the number of experts.
        widths: its keys for the width of an expert.
        refused: what a base's config may not say, as the mixture has not the like.
        dropped: keys of the base's config that it has not.
        shared: what its blocks call an expert of every token, the base's MLP; None: there is none. Its
            gate is zero, so that half of its output is added, and the routed experts' `down_proj` are
            halved: experts that equal the base make the base.
    """

    bases: tuple[str, ...]
    block: str
    parts: Mapping[str, str]
    settings: Mapping[str, Any]
    count: str
    widths: tuple[str, ...] = ("intermediate_size",)
    refused: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    shared: str | None = None

    def gate(self, layer: str) -> str:
        """Name of a layer's router."""
        return f"{layer}.{self.block}.gate.weight"

    def is_gate(self, name: str) -> bool:
        """Whether a tensor of the mixture is a router."""
        return name.endswith(f".{self.block}.gate.weight")

    def expert(self, layer: str, index: int, part: str) -> str:
        """Name of a matrix of an expert."""
        return f"{layer}.{self.block}.experts.{index}.{self.parts[part]}.weight"

    def shared_gate(self, layer: str) -> str:
        """Name of the gate of the shared expert."""
        return f"{layer}.{self.block}.{self.shared}_gate.weight"

    def shared_expert(self, layer: str, part: str) -> str:
        """Name of a matrix of the shared expert."""
        return f"{layer}.{self.block}.{self.shared}.{self.parts[part]}.weight"

    def of_base(self, name: str) -> str | None:
        """What of the mixture is made with the base, and not merged; None: a tensor is none of it."""
        if self.is_gate(name):
            return "a router"
        if self.shared is not None and f".{self.block}.{self.shared}" in name:
            return "the shared expert"
        return None

    def index(self, name: str) -> int | None:
        """Which expert a tensor of the mixture belongs to; None: to none."""
        found = re.search(rf"\.{self.block}\.experts\.(\d+)\.", name)
        return None if found is None else int(found[1])

    def config(self, base: Mapping[str, Any], experts: int, per_token: int) -> dict[str, Any]:
        """Return config.json of the mixture.

        Raises:
            InputError: the base is of another architecture, or has what the mixture cannot have.
        """
        kind = base.get("model_type")
        if kind not in self.bases:
            bases = " or ".join(self.bases)
            said = f"the base is of the architecture {kind!r}, and this mixture is made of {bases}"
            right = [name for name, other in ARCHITECTURES.items() if kind in other.bases]
            if right:
                raise InputError(f"{said}: write `architecture: {right[0]}` under moe")
            raise InputError(f"{said}: choose a base of one of them")
        for key in self.refused:
            if base.get(key):
                own = self.settings["model_type"]
                raise InputError(
                    f"the base's config.json says {key}, which {own} has not: choose a base without"
                )
        copied = _said(base) | {
            key: value
            for key, value in base.items()
            if key not in self.dropped and not (key == "num_key_value_heads" and value is None)
        }
        sizes = dict.fromkeys(self.widths, copied["intermediate_size"])
        counts = {self.count: experts, "num_experts_per_tok": per_token}
        return {**copied, **self.settings, **sizes, **counts}


# What transformers assumes of a dense config that does not say it; of a mixture it assumes other values.
_ASSUMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "sliding_window": None,
        },
        "mistral": {
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
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
    }
)


def _said(base: Mapping[str, Any]) -> dict[str, Any]:
    """What a dense config leaves to defaults that the mixture does not share."""
    found: dict[str, Any] = {"rms_norm_eps": 1e-6, **_ASSUMED[str(base["model_type"])]}
    if base.get("num_key_value_heads", found.get("num_key_value_heads")) is None:
        found["num_key_value_heads"] = base.get("num_attention_heads", 32)
    if "rope_parameters" not in base:
        found["rope_theta"] = 10000.0
    return found


_SAME = MappingProxyType({part: part for part in ("gate_proj", "down_proj", "up_proj")})
# Of the Qwens, which may have dense layers too, and weights that do not add up to 1.
_EVERY_LAYER: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mixtral": Architecture(
            bases=("llama", "mistral"),
            block="block_sparse_moe",
            parts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
            settings={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
            count="num_local_experts",
            refused=("attention_bias", "mlp_bias"),
            dropped=("attention_bias", "mlp_bias", "pretraining_tp"),
        ),
        "qwen2_moe": Architecture(
            bases=("qwen2",),
            block="mlp",
            parts=_SAME,
            settings=_EVERY_LAYER
            | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
            count="num_experts",
            widths=("moe_intermediate_size", "shared_expert_intermediate_size"),
            refused=("use_sliding_window",),
            shared="shared_expert",
        ),
        "qwen3_moe": Architecture(
            bases=("qwen3",),
            block="mlp",
            parts=_SAME,
            settings=_EVERY_LAYER
            | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            count="num_experts",
            widths=("moe_intermediate_size",),
            refused=("use_sliding_window",),
            dropped=("layer_types", "max_window_layers"),
        ),
    }
)
