"""From a recipe and headers to work: which tensor meets which rule, in what pieces, at what cost.

align    the base's tensors found in every expert; task heads, vocabularies, what does not fit
data     the statistics that methods with data need, found for each tensor
gguf     the same of a GGUF file: a type for every tensor, and what of the base's file stays
quantise which tensors are stored packed, in the base's layout or a named one, and what config.json says
rules    role and name rules resolved to one action a tensor
slices   sources as the recipe's slices see them, and in which slice a tensor lies
varied   parameters that differ from tensor to tensor, by depth or by name
operations, forms   what work reads, what is done with it, what it becomes
work     a tensor of the output, and the row ranges that are worked on as a whole
build    the plan: tensors, work items with bytes and FLOPs, totals
"""
