"""Quantised checkpoints, seen as plain ones: a format a file, dequantised as it is read.

A format finds, by names and headers, which stored tensors are parts of which plain one, checks
their sizes against each other before anything is read, and says how rows of it are computed.
Everything else of covmerge sees a checkpoint like any other (`Dequantised`).
"""

from covmerge.files.quantised.packed import DTYPE_KEYS, Packed, dtype_of
from covmerge.files.quantised.view import (
    QUANTISATION,
    Dequantised,
    dequantised,
    is_quantised,
    open_plain,
)
from covmerge.files.quantised.writing.layouts import LAYOUTS, SAME
from covmerge.files.quantised.writing.like import as_stored
from covmerge.files.quantised.writing.packing import Packing
from covmerge.files.quantised.writing.settings import with_plain

__all__ = [
    "DTYPE_KEYS",
    "LAYOUTS",
    "QUANTISATION",
    "SAME",
    "Dequantised",
    "Packed",
    "Packing",
    "as_stored",
    "dequantised",
    "dtype_of",
    "is_quantised",
    "open_plain",
    "with_plain",
]
