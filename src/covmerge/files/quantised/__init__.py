"""Quantised checkpoints, read as plain ones: a file for each family of formats.

A format finds, by names and headers, which stored tensors are parts of which plain tensor. It checks their
sizes against each other before anything is read, and computes rows of the plain tensor. To the rest of
covmerge, a quantised checkpoint looks like any other (`Dequantised`).
"""
