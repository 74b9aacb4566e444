"""mergekit's recipes as an input language: compiled to covmerge's own, with no engine of their own.

reading      their keys, checked: what is unknown is named with the nearest
models       references to models; names for them
methods      what each of their methods is here, and which parameters it has
pieces       models, slices and modules, each with its sources
parameters   all parameters of a method: precedence, filters and gradients as values by name and by depth
compiling    a whole recipe, or several in a file, which name each other's outputs
evolve       genomes of mergekit-evolve, as recipes with values that are searched
"""
