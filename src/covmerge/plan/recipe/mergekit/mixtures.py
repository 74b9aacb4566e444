"""Compiling a mergekit-moe file to a covmerge recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.models import Places, Reference, names_of, reference
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.strict_yaml import Origin

_KEYS = (
    *("base_model", "gate_mode", "dtype", "experts", "experts_per_token", "architecture"),
    "shared_experts",
)
_EXPERT_KEYS = ("source_model", "positive_prompts", "negative_prompts", "residual_scale")
_MODES = {
    **{mode: mode for mode in ("random", "uniform_random", "cheap_embed", "hidden", "hidden_avg")},
    "hidden_last": "hidden",  # both are the same in mergekit
}


@dataclass(frozen=True)
class _Theirs:
    """An output format of mergekit-moe, and the covmerge architectures that make the same model."""

    alone: str | None  # the architecture without a shared expert; None: the format needs one
    beside: str | None = None  # the architecture with a shared expert; None: the format has none
    gated: bool = False  # whether the shared expert has a gate


# mergekit uses the first format that a file fits, in this order. Its DeepSeek is the first
# DeepSeek-MoE, which transformers does not have.
_OUTPUTS: Mapping[str, _Theirs] = {
    "mixtral": _Theirs("mixtral"),
    "deepseek moe": _Theirs("mixtral", "qwen2_moe"),
    "qwen moe": _Theirs(None, "qwen2_moe", gated=True),
    "qwen3 moe": _Theirs("qwen3_moe"),
}


def is_mergekit_moe(data: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a mergekit-moe file; no mergekit recipe has these keys."""
    return "base_model" in data and "experts" in data and "merge_method" not in data


def compile_moe(
    data: Mapping[str, Any], origin: Origin, log: ImportLog, places: Places
) -> dict[str, Any]:
    """Return the recipe that makes the same model as mergekit-moe makes from its file.

    Attention, norms and embeddings come from the base.
    """
    part = Part(data, (), origin, log)
    part.check_keys(_KEYS)
    experts = part.parts("experts")
    shared = part.parts("shared_experts") if data.get("shared_experts") else []
    if len(shared) > 1:
        part.refuse("covmerge shares one expert: leave the others out", "shared_experts")
    for expert in (*experts, *shared):
        if expert.data.get("noise_scale") is not None:
            expert.refuse("covmerge adds no noise to weights: leave it out", "noise_scale")
        expert.check_keys(_EXPERT_KEYS)
    mode = data.get("gate_mode", "hidden")
    if mode not in _MODES:
        part.refuse(
            f"gate_mode is {shown(mode)}; covmerge has {', '.join(_MODES)}: write one of them",
            "gate_mode",
        )
    models = [_model(expert, "source_model") for expert in experts]
    if len(set(models)) < len(models):
        part.refuse(
            "two experts are the same model, so a gate between them does nothing: leave one out",
            "experts",
        )
    names = names_of(models)
    named = {names[model]: (model, own) for model, own in zip(models, experts, strict=True)}
    theirs = _output(part, shared, mode)
    moe: dict[str, Any] = {"architecture": theirs.alone}
    if shared:
        model = _model(shared[0], "source_model")
        name = names_of([model], named)[model]
        named[name] = model, shared[0]
        moe = {
            "architecture": theirs.beside,
            "shared": {"expert": name, "gated": theirs.gated},
            "residual_scale": dict.fromkeys(named, 1.0),  # mergekit's default
        }
    scales = {
        name: own.data["residual_scale"]
        for name, (_, own) in named.items()
        if own.data.get("residual_scale") is not None
    }
    moe |= {
        "gates": _MODES[mode],
        "experts_per_token": data.get("experts_per_token", 2),
        "residual_scale": moe.get("residual_scale", {}) | scales,
        "prompts": {
            name: {
                "positive": own.data["positive_prompts"],
                "negative": own.data.get("negative_prompts") or [],
            }
            for name, (_, own) in named.items()
            if own.data.get("positive_prompts")
        },
    }
    made: dict[str, Any] = {
        "base": places.located(_model(part, "base_model").model),
        "experts": {name: places.located(model.model) for name, (model, _) in named.items()},
        "allow": ["unchanged-expert"],  # the base may be one of the experts
        "moe": moe,
        "rules": [{"match": "*", "use": "base"}],
    }
    dtype = part.dtype("dtype")
    return made if dtype is None else made | {"output": {"dtype": dtype}}


def _output(part: Part, shared: Sequence[Part], mode: str) -> _Theirs:
    """Return the output format that mergekit-moe would choose."""
    given = str(part.data.get("architecture") or "").lower().replace("_", " ")
    named = {name: own for name, own in _OUTPUTS.items() if name.startswith(given)}
    if not named:
        part.refuse(
            f"architecture is {shown(part.data['architecture'])}; mergekit-moe has mixtral, deepseek, qwen "
            "and qwen3: write one of them",
            "architecture",
        )
    if not shared:
        fit = [own for own in named.values() if own.alone is not None]
        if not fit:
            part.refuse("qwen needs a shared expert: add one under shared_experts", "architecture")
        return fit[0]
    prompted = bool(shared[0].data.get("positive_prompts"))
    fit = [
        own
        for own in named.values()
        if own.beside is not None and (prompted == own.gated or (own.gated and mode == "random"))
    ]
    if len(fit) == 1:
        return fit[0]
    these = "either" if fit else "neither"
    part.refuse(
        "the shared expert has a gate, by its positive_prompts or at random, with `architecture: qwen`, "
        f"and none with `architecture: deepseek`; this is {these}: change one of them",
        "shared_experts",
    )


def _model(part: Part, key: str) -> Reference:
    found = reference(part, key)
    if found.lora:
        part.refuse(
            "an adapter cannot become an expert: fold it into its base first "
            "(`covmerge merge --base BASE --expert lora=ADAPTER OUT`)",
            key,
        )
    return found
