"""README and addresses of the package's metadata, as PyPI shows them: no link of it may be relative.

The repository is where the build says that it is: the variables that GitHub's workflows have. Built
elsewhere, links into the repository become plain text, and no address is claimed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the two fields."""
        server, repository = (os.environ.get(f"GITHUB_{n}") for n in ("SERVER_URL", "REPOSITORY"))
        address = f"{server}/{repository}" if server and repository else None
        text = Path(self.root, "README.md").read_text("utf-8")
        text = absolute(text, address, os.environ.get("GITHUB_SHA", "main"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            issues = f"{address}/issues"
            metadata["urls"] = {"Repository": address, "Issues": issues}


def absolute(text: str, address: str | None, commit: str) -> str:
    """Return a text whose links into the repository lead to it, or are none."""

    def turned(link: re.Match[str]) -> str:
        picture, title, target = link.groups()
        if address is None:
            return "" if picture else title
        kind = "raw" if picture else "blob"
        return f"{picture}[{title}]({address}/{kind}/{commit}/{target})"

    return _LINK.sub(turned, text)
