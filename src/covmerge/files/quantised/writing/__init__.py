"""Quantised output: a plain tensor rounded to the nearest numbers of a format, in its client's layout.

packing    what a packed tensor is stored as, and how it is read back
scaled, bitsandbytes, integers, gguf   the rounding, a family of formats a file
like       the packing of a tensor that is like a stored one
layouts    the formats by name: what is stored of a plain tensor, and what config.json says
"""
