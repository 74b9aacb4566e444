"""What a merge did, checked: re-reading an output and holding it against its manifest.

outcome  the outcome of checks, and what all outputs have in common
files    every file against its recorded hash, and what is checked of one of weights as it is hashed
verify   all of it, in one reading of the output
"""

from covmerge.run.verification.files import WeightsCheck
from covmerge.run.verification.outcome import DIFFERS, Check, Verification
from covmerge.run.verification.verify import examine, verify

__all__ = ["DIFFERS", "Check", "Verification", "WeightsCheck", "examine", "verify"]
