"""The command that scores a merge and others, for the end of a merge and for its report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from covmerge.maths.methods import registry
from covmerge.plan.recipe import TensorRules

_BESIDE = ("auto", "tsv_m", "iso_c")  # methods to score beside the method of the merge
EVALUATION = "python your_eval.py {model}"


def score_command(recipe: Mapping[str, Any], out: str) -> str | None:
    """Return a command that merges the same experts by this method and others, and scores each.

    It is None if flags cannot express the recipe, or `compare` has nothing to compare. `recipe` is as in
    covmerge.json; the models are put beside `out`.

    Example:
        >>> experts = {"a": {"source": "./a", "weight": 1.0}, "b": {"source": "b c", "weight": 1.0}}
        >>> recipe = {"base": "./base", "experts": experts, "method": "ties", "parameters": {}}
        >>> print(score_command(recipe, "merged"))  # doctest: +NORMALIZE_WHITESPACE
        covmerge compare --base ./base --expert a=./a --expert 'b=b c' --methods ties,auto,tsv_m,iso_c
        --out merged-scored --score 'python your_eval.py {model}'
    """
    experts: Mapping[str, Mapping[str, Any]] = recipe["experts"]
    method, parameters = recipe["method"], recipe["parameters"]
    if recipe.get("base") is None or len(experts) < 2 or _is_more(recipe):
        return None
    if registry.get(method).writes_masks or any(
        isinstance(v, dict | list) for v in parameters.values()
    ):
        return None
    set_ = {key: value for key, value in parameters.items() if value is not None}
    given = ",".join(f"{key}={json.dumps(value)}" for key, value in set_.items())
    methods = [f"{method}({given})" if given else method, *(m for m in _BESIDE if m != method)]
    command = ["covmerge", "compare", "--base", recipe["base"]]
    by_default = TensorRules().model_dump()
    for name, expert in experts.items():
        command += ["--expert", f"{name}={expert['source']}"]
    for name, expert in experts.items():
        command += ["--weight", f"{name}={expert['weight']:g}"] if expert["weight"] != 1 else []
    for key, value in recipe.get("tensors", {}).items():
        command += ["--tensors", f"{key}={value}"] if value != by_default.get(key) else []
    command += ["--methods", ",".join(methods), "--out", f"{out}-scored", "--score", EVALUATION]
    return shlex.join(command)


def _is_more(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe has settings that the command's flags cannot express."""
    experts = recipe["experts"].values()
    said = ("rules", "before", "after", "slices", "moe", "tokenizer", "allow")
    plain = recipe.get("output", {}).get("quantise", "none") == "none" and all(
        isinstance(expert["weight"], int | float) and not expert.get("statistics")
        for expert in experts
    )
    return not plain or any(recipe.get(key) for key in said)
