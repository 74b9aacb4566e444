"""A mixture of experts out of dense ones: its architectures, the weights of its routers, its view."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import shown, some
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, copy_rows, find_header, refuse_adapter
from covmerge.files.checkpoints.config_counts import layer_count
from covmerge.files.checkpoints.view import View
from covmerge.plan.recipe.sections import Mixture
from covmerge.plan.vocabulary.tokens import load_tokenizer, read_files

# The mixture-of-experts architectures that dense experts can become: a row each.

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


# The routers' weights, `(layers, experts, hidden)` in float32.

EMBEDDING = "model.embed_tokens.weight"
_NEARLY_DEPENDENT = 5.0  # condition number above which mergekit-moe warns too


def gates_of(moe: Mixture, experts: Sequence[str], base: Checkpoint, layers: int) -> Tensor:
    """Return the routers of all layers.

    Args:
        moe: of the recipe.
        experts: their names, in order.
        base: the dense base.
        layers: how many it has.

    Raises:
        InputError: the base has no tokenizer, or a prompt is nothing to it.
    """
    hidden = base.headers[EMBEDDING].shape[1]
    shape = (layers, len(experts), hidden)
    if moe.gates != "cheap_embed":
        generator = torch.Generator().manual_seed(moe.seed)
        if moe.gates == "random":
            return torch.randn(shape, generator=generator)
        bound = hidden**-0.5
        return torch.rand(shape, generator=generator) * 2 * bound - bound
    encode = _encoder(base)
    rows: list[Tensor] = []
    for name in experts:
        said = moe.prompts[name]
        row = _unit(_sum(base, [encode(text) for text in said.positive]))
        if said.negative:
            row = _unit(row - _unit(_sum(base, [encode(text) for text in said.negative])))
        if not row.any():
            raise InputError(
                f"expert '{name}': the gate of its prompts is zero: write positive prompts of other tokens "
                "than the negative ones"
            )
        rows.append(row)
    return torch.stack(rows).expand(shape).contiguous()


def warnings_of(gates: Tensor) -> list[str]:
    """Return a warning where the gates of a layer are nearly dependent."""
    linalg = cast("Any", torch.linalg)
    conditions: list[float] = linalg.cond(gates.double()).tolist()
    worst = max(conditions)
    if worst <= _NEARLY_DEPENDENT:
        return []
    count = sum(condition > _NEARLY_DEPENDENT for condition in conditions)
    return [
        f"the gates are nearly dependent in {count} of {len(conditions)} layers (condition number up to "
        f"{worst:.3g}; {_NEARLY_DEPENDENT:g} is much), so some experts will seldom be chosen: write "
        "prompts that differ more, or add what the experts share as negative prompts"
    ]


def _unit(row: Tensor) -> Tensor:
    length: float = cast("Any", row).norm().item()
    return row / max(length, 1e-8)


def _sum(base: Checkpoint, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Sum of the embeddings of all tokens of all prompts; each row is read once."""
    counts = Counter(number for prompt in prompts for number in prompt)
    total = torch.zeros(base.headers[EMBEDDING].shape[1], dtype=torch.float32)
    for index, count in sorted(counts.items()):
        total += count * base.read(EMBEDDING, range(index, index + 1))[0].float()
    return total


def _encoder(base: Checkpoint) -> Callable[[str], list[int]]:
    """Return what gives a prompt's tokens: BOS before it, and nothing else, as mergekit-moe has it."""
    folder = base.companions()
    if folder is None or not read_files(folder):
        raise InputError(
            f"{base.source} has no tokenizer, which `gates: cheap_embed` needs: put its files beside the "
            "weights, or use `gates: random`"
        )
    tokenizer = load_tokenizer(folder)
    rows = base.headers[EMBEDDING].shape[0]

    def encode(text: str) -> list[int]:
        found = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False)
        ids: list[int] = list(found["input_ids"])
        if not ids or max(ids) >= rows:
            raise InputError(
                f"{folder}: its tokenizer makes {ids[:5]} of the prompt {shown(text)}, and the base has "
                f"{rows} embeddings: change the prompt, or correct the tokenizer"
            )
        return ids

    return encode


# A dense checkpoint under the names of a mixture of experts.


class MixtureView(View):
    """A view of a dense checkpoint: each expert of the mixture is its MLP, so that any expert can be read.

    Args:
        stored: the checkpoint.
        architecture: of the mixture.
        gates: `(layers, experts, hidden)`, of all routers.
        per_token: experts that a token is given to.
        notes: what there is to say of the mixture.

    Raises:
        InputError: it is of no architecture that the architecture holds.
    """

    def __init__(
        self,
        stored: Checkpoint,
        architecture: Architecture,
        gates: Tensor,
        per_token: int,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(stored, None, *notes)
        self._gates = gates
        if stored.config is not None:
            self.config = architecture.config(stored.config, gates.shape[1], per_token)
        self._places: dict[str, str | int] = {}  # in the checkpoint, or the layer of a router
        headers: dict[str, TensorHeader] = {}
        for name, place, header in self._mixed(architecture):
            self._places[name] = place
            headers[name] = replace(header, name=name)
        self.headers = MappingProxyType(headers)

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        header = find_header(self.headers, name, rows, self.source)
        place = self._places[name]
        if isinstance(place, str):
            return self._stored.read(place, rows)
        return copy_rows(self._gates[place].to(header.dtype), rows)

    def _mixed(self, architecture: Architecture) -> Iterator[tuple[str, str | int, TensorHeader]]:
        _, count, hidden = self._gates.shape
        for name, header in self._stored.headers.items():
            found = MLP.fullmatch(name)
            if ".mlp." in name and (found is None or found["part"] not in architecture.parts):
                raise InputError(
                    f"{self.source} has '{name}', and an expert of a mixture has "
                    f"{some(architecture.parts)} alone: this model cannot become one"
                )
            if found is None:
                yield name, name, header
                continue
            layer, part = found["layer"], found["part"]
            if part == next(iter(architecture.parts)):
                shape = (count, hidden)
                number = int(layer.rpartition(".")[2])
                yield architecture.gate(layer), number, replace(header, shape=shape)
            for index in range(count):
                yield architecture.expert(layer, index, part), name, header


def mixed(
    moe: Mixture | None, sources: Mapping[str | None, Checkpoint], experts: Sequence[str]
) -> Mapping[str | None, Checkpoint]:
    """Return base (None) and experts as they look to a plan of this mixture; themselves without one.

    Args:
        moe: of the recipe.
        sources: those that the plan reads; the base is among them.
        experts: names of all experts, in their order.

    Raises:
        InputError: a source is an adapter, or of another architecture; gates cannot be made.
    """
    if moe is None or isinstance(sources[None], MixtureView):
        return sources
    architecture, base = ARCHITECTURES[moe.architecture], sources[None]
    for name, source in sources.items():
        refuse_adapter(source, "a mixture is made of models", str(name))
    layers = layer_count(base.config)
    if layers is None or EMBEDDING not in base.headers:
        raise InputError(
            f"{base.source} lacks a config.json with the number of layers, or '{EMBEDDING}': a mixture is "
            f"made of models of {' or '.join(architecture.bases)}"
        )
    found = {int(m["layer"].rpartition(".")[2]) for n in base.headers if (m := MLP.fullmatch(n))}
    if found != set(range(layers)):
        raise InputError(
            f"{base.source}: config.json says {layers} layers, and {len(found)} of them have an MLP: "
            "correct config.json"
        )
    gates = gates_of(moe, experts, base, layers)
    notes = warnings_of(gates)
    return {
        name: MixtureView(source, architecture, gates, moe.experts_per_token, () if name else notes)
        for name, source in sources.items()
    }
