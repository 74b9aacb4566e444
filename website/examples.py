"""Docstrings say `Example:`; griffe reads what follows as code under `Examples:` alone."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Let an example of a docstring be shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
