"""Verification of an output: re-reading its files and comparing them with its manifest."""

from covmerge.run.verification.outcome import DIFFERS, Check, Verification
from covmerge.run.verification.verify import examine, verify

__all__ = ["DIFFERS", "Check", "Verification", "examine", "verify"]
