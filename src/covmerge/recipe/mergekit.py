"""Recipes of mergekit: recognised, and refused with their covmerge counterpart."""

from __future__ import annotations

from collections.abc import Collection

from covmerge.errors import RecipeError

_KEYS = ("merge_method", "models", "base_model")

_COUNTERPART = """\
  mergekit                                         covmerge
  base_model: B                                    base: B
  models:                                          experts:
    - {model: M, parameters: {weight: 0.5}}          NAME: {source: M, weight: 0.5}
  merge_method: METHOD                             method: METHOD      (see `covmerge methods`)
  parameters: {...}                                parameters: {...}   (see `covmerge methods NAME`)
  dtype: float32, out_dtype: bfloat16              dtype: float32, output: {dtype: bfloat16}
  slices: ...                                      none: covmerge does not re-stack layers"""


def refuse_mergekit(keys: Collection[str], name: str) -> None:
    """Raise a RecipeError that shows the counterpart of each key if these are mergekit's keys."""
    found = [key for key in _KEYS if key in keys]
    if found:
        raise RecipeError(
            f"{name}: {', '.join(found)}: this is a mergekit recipe, which this version does not "
            f"read. Write it as a covmerge recipe:\n{_COUNTERPART}"
        )
