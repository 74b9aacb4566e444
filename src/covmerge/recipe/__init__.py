"""Recipes: what to merge, how, and what to do with which tensor."""

from covmerge.recipe.load import differing, dump_recipe, load_recipe, parse_recipe
from covmerge.recipe.schema import (
    Expert,
    Output,
    Recipe,
    Rule,
    Slice,
    TensorRules,
    json_schema,
    output_as,
)
from covmerge.recipe.tokenizer import TokenizerRules
from covmerge.sizes import format_size, parse_size

__all__ = [
    "Expert",
    "Output",
    "Recipe",
    "Rule",
    "Slice",
    "TensorRules",
    "TokenizerRules",
    "differing",
    "dump_recipe",
    "format_size",
    "json_schema",
    "load_recipe",
    "output_as",
    "parse_recipe",
    "parse_size",
]
