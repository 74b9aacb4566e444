"""Quantised checkpoints, read as plain ones: a format a file, dequantised as it is read.

A format finds, by names and headers, which stored tensors are parts of which plain one, checks
their sizes against each other before anything is read, and says how rows of it are computed.
Everything else of covmerge sees a checkpoint like any other (`Dequantised`).
"""
