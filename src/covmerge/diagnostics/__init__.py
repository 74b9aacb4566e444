"""What a merge did, checked: re-reading an output and holding it against its manifest."""

from covmerge.diagnostics.verify import DIFFERS, Check, VerifyReport, verify

__all__ = ["DIFFERS", "Check", "VerifyReport", "verify"]
