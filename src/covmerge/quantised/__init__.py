"""Quantised checkpoints, seen as plain ones: a format a file, dequantised as it is read.

A format finds, by names and headers, which stored tensors are parts of which plain one, checks
their sizes against each other before anything is read, and says how rows of it are computed.
Everything else of covmerge sees a checkpoint like any other (`Dequantised`).
"""

from covmerge.quantised.packed import DTYPE_KEYS, Packed, dtype_of
from covmerge.quantised.view import (
    QUANTISATION,
    Dequantised,
    dequantised,
    is_derived,
    is_quantised,
    open_plain,
)
from covmerge.quantised.writing.layouts import LAYOUTS, SAME
from covmerge.quantised.writing.like import as_stored
from covmerge.quantised.writing.packing import Packing
from covmerge.quantised.writing.settings import with_plain

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
    "is_derived",
    "is_quantised",
    "open_plain",
    "with_plain",
]
