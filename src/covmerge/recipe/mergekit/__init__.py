"""mergekit's recipes as an input language: compiled to covmerge's own, with no engine of their own.

reading      their keys, checked: what is unknown is named with the nearest
models       references to models; names for them
methods      what each of their methods is here, and which parameters it has
tokenizers   their rules of tokens and chat templates
settings     their precedence, filters and gradients as values by name and by depth
compiling    a whole recipe
"""

from covmerge.recipe.mergekit.compiling import compile_mergekit
from covmerge.recipe.mergekit.reading import Told, is_mergekit

__all__ = ["Told", "compile_mergekit", "is_mergekit"]
