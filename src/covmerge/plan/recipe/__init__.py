"""Recipes: what to merge, by which method, and what to do with each tensor."""

from covmerge.plan.recipe.load import differing, dump_recipe, lay_over, load_recipe, parse_recipe
from covmerge.plan.recipe.parts import read_call
from covmerge.plan.recipe.schema import (
    Expert,
    Output,
    Recipe,
    Rule,
    Slice,
    TensorRules,
    json_schema,
    output_as,
)
from covmerge.plan.recipe.sections import Mixture, TokenizerRules

__all__ = [
    "Expert",
    "Mixture",
    "Output",
    "Recipe",
    "Rule",
    "Slice",
    "TensorRules",
    "TokenizerRules",
    "differing",
    "dump_recipe",
    "json_schema",
    "lay_over",
    "load_recipe",
    "output_as",
    "parse_recipe",
    "read_call",
]
