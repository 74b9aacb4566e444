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
        dropped: keys of the base's config that it has not.
    """

    bases: tuple[str, ...]
    block: str
    parts: Mapping[str, str]
    settings: Mapping[str, Any]
    count: str
    dropped: tuple[str, ...] = ()

    def gate(self, layer: str) -> str:
        """Name of a layer's router."""
        return f"{layer}.{self.block}.gate.weight"

    def is_gate(self, name: str) -> bool:
        """Whether a tensor of the mixture is a router."""
        return name.endswith(f".{self.block}.gate.weight")

    def expert(self, layer: str, index: int, part: str) -> str:
        """Name of a matrix of an expert."""
        return f"{layer}.{self.block}.experts.{index}.{self.parts[part]}.weight"

    def index(self, name: str) -> int | None:
        """Which expert a tensor of the mixture belongs to; None: to none."""
        found = re.search(rf"\.{self.block}\.experts\.(\d+)\.", name)
        return None if found is None else int(found[1])

    def config(self, base: Mapping[str, Any], experts: int, per_token: int) -> dict[str, Any]:
        """Return config.json of the mixture.

        Raises:
            InputError: the base is of another architecture, or has biases in its MLP.
        """
        if base.get("model_type") not in self.bases:
            raise InputError(
                f"the base is of the architecture {base.get('model_type')!r}, and this mixture is made of "
                f"{' or '.join(self.bases)}: choose a base of one of them"
            )
        if base.get("attention_bias") or base.get("mlp_bias"):
            raise InputError(
                "the base's config.json says attention_bias or mlp_bias, and the mixture has no biases"
            )
        copied = _said(base) | {
            key: value
            for key, value in base.items()
            if key not in self.dropped and not (key == "num_key_value_heads" and value is None)
        }
        return {**copied, **self.settings, self.count: experts, "num_experts_per_tok": per_token}


# What transformers assumes of a dense config that does not say it; of a mixture it assumes other values.
_ASSUMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"max_position_embeddings": 2048, "sliding_window": None},
        "mistral": {
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
    }
)


def _said(base: Mapping[str, Any]) -> dict[str, Any]:
    """What a dense config leaves to defaults that the mixture does not share."""
    found: dict[str, Any] = {"rms_norm_eps": 1e-6, **_ASSUMED[str(base["model_type"])]}
    if base.get("num_key_value_heads") is None and "num_key_value_heads" not in found:
        found["num_key_value_heads"] = base.get("num_attention_heads", 32)
    if "rope_parameters" not in base:
        found["rope_theta"] = 10000.0
    return found


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "mixtral": Architecture(
            bases=("llama", "mistral"),
            block="block_sparse_moe",
            parts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
            settings={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
            count="num_local_experts",
            dropped=("attention_bias", "mlp_bias", "pretraining_tp"),
        )
    }
)
