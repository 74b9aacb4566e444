"""What a merge did, checked: re-reading an output and holding it against its manifest.

report          the outcome of checks, and what all outputs have in common
verify          a merged model
verify_adapter  a merged adapter
"""

from covmerge.diagnostics.report import DIFFERS, Check, VerifyReport
from covmerge.diagnostics.verify import verify
from covmerge.diagnostics.verify_adapter import verify_adapter

__all__ = ["DIFFERS", "Check", "VerifyReport", "verify", "verify_adapter"]
