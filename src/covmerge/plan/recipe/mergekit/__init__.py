"""mergekit's recipes as an input language: compiled to covmerge's own, with no engine of their own.

reading      their keys, checked: what is unknown is named with the nearest
models       references to models; names for them
methods      what each of their methods is here, and which parameters it has
pieces       models, slices and modules, each with its sources
modules      what differs by module as values by name
tokenizers   rules of tokens and chat templates
settings     precedence, filters and gradients as values by name and by depth
parameters   all parameters of a method
compiling    a whole recipe
evolve       genomes of mergekit-evolve, as recipes with values that are searched
documents    several recipes in a file, which name each other's outputs
"""
