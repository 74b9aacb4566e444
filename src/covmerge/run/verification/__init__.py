"""Verification of an output: re-reading its files and comparing them with its manifest.

outcome  the outcome of checks, and the check of task heads, which every output has
files    the check of every file's hash, and the checks of a weight file's tensors while it is hashed
verify   all checks, in one reading of the output
"""

from covmerge.run.verification.outcome import DIFFERS, Check, Verification
from covmerge.run.verification.verify import examine, verify

__all__ = ["DIFFERS", "Check", "Verification", "examine", "verify"]
