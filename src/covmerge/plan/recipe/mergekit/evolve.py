"""A genome of mergekit-evolve, turned into a mergekit recipe with values marked for a search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

from covmerge.files.checkpoints.config_counts import layer_count
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.recipe.mergekit.models import Places, reference
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.strict_yaml import Origin
from covmerge.plan.recipe.varied import SEARCH

GENOME = "genome"
_KEYS = (
    *("models", "merge_method", "base_model", "tokenizer_source", "layer_granularity"),
    *("normalize", "allow_negative_weights", "filters", "smooth"),
)
# Keys for the scoring of merges, which in covmerge the caller decides.
_SCORING = (
    *("tasks", "limit", "num_fewshot", "shuffle", "random_init", "apply_chat_template"),
    "fewshot_as_multiturn",
)
_SEARCHED: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight",),
    "task_arithmetic": ("weight",),
    "ties": ("weight", "density"),
    "dare_ties": ("weight", "density"),
}
_NORMALIZED = ("ties", "dare_ties", "linear")


def compile_genome(
    data: Mapping[str, Any], origin: Origin, log: ImportLog, places: Places
) -> dict[str, Any]:
    """Return the mergekit recipe of the genome's trials, with the genotype's numbers marked.

    mergekit's numbers are unbounded and used as |x|; here a weight is in [0, 1], or in [-1, 1].
    """
    whole = Part(data, (), origin, log)
    whole.check_keys((GENOME, *_SCORING))
    genome = whole.part(GENOME)
    genome.check_keys(_KEYS)
    given = genome.data
    method = str(given.get("merge_method"))
    if method == "slerp":
        genome.refuse(
            "mergekit-evolve's slerp takes the two models of the largest numbers, and no search has such a "
            "choice: write a recipe with `merge_method: slerp` and `t: {search: [0, 1]}`",
            "merge_method",
        )
    if method not in _SEARCHED:
        genome.refuse(f"{method!r} is none of {', '.join(_SEARCHED)}", "merge_method")
    models = [part.data for part in _models(genome)]
    scored = [key for key in _SCORING if key in data]
    if scored:
        log.notes.append(
            f"{origin.name}: {', '.join(scored)} say what mergekit scores; here the scorer does"
        )
    base = [{"model": given["base_model"]}] if given.get("base_model") else []
    others = [model for model in base if model["model"] not in (m["model"] for m in models)]
    count = _groups(genome, places)
    if count == 1 or given.get("smooth"):
        merged: dict[str, Any] = {
            "models": [
                *({**model, "parameters": _values(method, given, count)} for model in models),
                *others,
            ]
        }
    else:
        step = int(given["layer_granularity"])
        merged = {
            "slices": [
                {
                    "sources": [
                        *(
                            {**model, **at, "parameters": _values(method, given, 1)}
                            for model in models
                        ),
                        *({**model, **at} for model in others),
                    ]
                }
                for at in ({"layer_range": [n * step, (n + 1) * step]} for n in range(count))
            ]
        }
    normalize = given.get("normalize")
    normalize = method in _NORMALIZED if normalize is None else normalize
    copied = {key: given[key] for key in ("base_model", "tokenizer_source") if given.get(key)}
    return {
        "merge_method": method,
        **merged,
        "parameters": {"normalize": normalize, "int8_mask": True},
        "dtype": "bfloat16",
        **copied,
    }


def _values(method: str, given: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """Return the marked parameters of one model."""
    filters = cast("Sequence[object]", given.get("filters") or ())

    def marked(name: str) -> Any:
        least = -1.0 if name == "weight" and given.get("allow_negative_weights") else 0.0
        marks = [{SEARCH: [least, 1.0]} for _ in range(groups)]
        return marks if groups > 1 else marks[0]

    def filtered(name: str) -> Any:
        entries = ({"filter": text, "value": marked(name)} for text in filters)
        return [*entries, {"value": marked(name)}] if filters else marked(name)

    return {name: filtered(name) for name in _SEARCHED[method]}


def _models(genome: Part) -> Iterator[Part]:
    given = genome.data.get("models")
    if not isinstance(given, list) or not given:
        genome.refuse("`models` is a list of models", "models")
    for model in cast("Sequence[object]", given):
        yield Part({"model": model}, (*genome.path, "models"), genome.origin, genome.log)


def _groups(genome: Part, places: Places) -> int:
    """Return the number of groups of layers that have separate numbers."""
    step = genome.data.get("layer_granularity", 0)
    if not isinstance(step, int) or isinstance(step, bool):
        genome.refuse(
            f"`layer_granularity` is {step!r}; it is a number of layers", "layer_granularity"
        )
    if step < 1:
        return 1
    first = next(_models(genome))
    with closing(open_checkpoint(places.located(reference(first, "model").model))) as checkpoint:
        layers = layer_count(checkpoint.config)
    if not layers or layers % step:
        genome.refuse(
            f"{layers or 'no'} layers are not groups of {step}: give a divisor", "layer_granularity"
        )
    return layers // step
