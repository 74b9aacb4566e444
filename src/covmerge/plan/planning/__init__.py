"""From a recipe and headers to work: the rule of each tensor, the work items, and their costs.

align    finds the base's tensors in every expert; task heads, vocabularies, tensors that do not fit
data     finds the statistics of each tensor, for methods with data
gguf     the types of a GGUF output's tensors, and what is copied from the base's file
quantise which tensors are packed, in the base's layout or a named one, and config.json's settings
rules    resolves role and name rules to one action for each tensor
slices   views of sources for the recipe's slices, and the slice of each tensor
varied   parameters that differ from tensor to tensor, by depth or by name
operations, forms   what work reads, does and writes
work     tensors of the output, and ranges of rows that are processed together
build    the plan: tensors, work items with bytes and FLOPs, totals
"""
