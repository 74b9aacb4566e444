"""mergekit's recipes as an input language, compiled to covmerge's recipes."""
