"""A file of mergekit-moe's as a recipe of covmerge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.models import Places, Reference, names_of, reference
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.strict_yaml import Origin

_KEYS = ("base_model", "gate_mode", "dtype", "experts", "experts_per_token", "architecture")
_REFUSED = {
    "shared_experts": "covmerge writes Mixtral, which has no shared experts: leave it out",
}
_EXPERT_KEYS = ("source_model", "positive_prompts", "negative_prompts")
_EXPERT_REFUSED = {
    "noise_scale": "covmerge adds no noise to weights: leave it out",
    "residual_scale": "covmerge takes the experts' weights as they are: leave it out",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MODES = ("random", "uniform_random", "cheap_embed")


def is_mergekit_moe(data: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a file of mergekit-moe's, which no recipe of mergekit looks like."""
    return "base_model" in data and "experts" in data and "merge_method" not in data


def compile_moe(
    data: Mapping[str, Any], origin: Origin, log: ImportLog, places: Places | None = None
) -> dict[str, Any]:
    """Return the recipe that makes what mergekit-moe makes of its file.

    Attention, norms and embeddings are the base's.

    Raises:
        RecipeError: an unknown key, or one that covmerge does not do, with the next step.
    """
    part = Part(data, (), origin, log)
    places = places or Places()
    _refuse(part, _REFUSED)
    part.check_keys(_KEYS)
    experts = part.parts("experts")
    for expert in experts:
        _refuse(expert, _EXPERT_REFUSED)
        expert.check_keys(_EXPERT_KEYS)
    architecture = data.get("architecture")
    if architecture is not None and not "mixtral".startswith(str(architecture).lower()):
        part.refuse(
            f"architecture is {shown(architecture)}; covmerge writes mixtral", "architecture"
        )
    mode = data.get("gate_mode", "hidden")
    if mode not in _MODES:
        part.refuse(
            f"gate_mode is {shown(mode)}{'' if 'gate_mode' in data else ', the default of mergekit'}; "
            f"covmerge has {', '.join(_MODES)}: write one of them",
            "gate_mode",
        )
    models = [_model(expert, "source_model") for expert in experts]
    if len(set(models)) < len(models):
        part.refuse(
            "two experts are the same model, so a gate between them does nothing: leave one out",
            "experts",
        )
    names = names_of(models)
    found: dict[str, Any] = {
        "base": places.located(_model(part, "base_model").model),
        "experts": {names[model]: places.located(model.model) for model in models},
        "allow": ["unchanged-expert"],  # the base may be one of the experts
        "moe": {
            "gates": mode,
            "experts_per_token": data.get("experts_per_token", 2),
            "prompts": {
                names[model]: {
                    "positive": expert.data["positive_prompts"],
                    "negative": expert.data.get("negative_prompts") or [],
                }
                for model, expert in zip(models, experts, strict=True)
                if expert.data.get("positive_prompts")
            },
        },
        "rules": [{"match": "*", "use": "base"}],
    }
    dtype = data.get("dtype")
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            part.refuse(f"dtype is {shown(dtype)}; it is one of {', '.join(_DTYPES)}", "dtype")
        found["output"] = {"dtype": name}
    return found


def _model(part: Part, key: str) -> Reference:
    found = reference(part, key)
    if found.lora:
        part.refuse(
            "an adapter cannot become an expert: fold it into its base first "
            "(`covmerge merge --base BASE --expert lora=ADAPTER OUT`)",
            key,
        )
    return found


def _refuse(part: Part, refused: Mapping[str, str]) -> None:
    for key, why in refused.items():
        if part.data.get(key) is not None:
            part.refuse(f"{key}: {why}", key)
