"""Quantised output: plain tensors rounded to the nearest numbers of a format, in its client's layout.

packing    the stored parts of a packed tensor, and how it is read back
scaled, bitsandbytes, integers, gguf   the rounding, one family of formats per file
like       the packing for a tensor that is stored like a given one
layouts    the formats by name: the stored parts of a plain tensor, and the entries of config.json
"""
