"""What a merge did, checked: re-reading an output and holding it against its manifest."""

from covmerge.diagnostics.verify import Check, VerifyReport, verify

__all__ = ["Check", "VerifyReport", "verify"]
