"""mergekit's recipes as an input language, compiled to covmerge's recipes.

reading      reads and checks keys; an unknown key is named with the nearest known one
models       reads references to models, and names the models
methods      the counterpart of each of mergekit's methods, with its parameters
pieces       models, slices and modules, each with its sources
parameters   parameters of a method: precedence, filters and gradients as values by name and by depth
compiling    compiles a recipe, or several in a file that name each other's outputs
evolve       turns genomes of mergekit-evolve into recipes with values to search
"""
