"""The page as one file, which loads nothing else."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from covmerge.base.version import __version__
from covmerge.files.stores.disk import replace_file
from covmerge.front.reporting.job import check_place
from covmerge.front.reporting.style import COLOURS
from covmerge.front.viewer.scene import Scene

FILE_NAME = "view.html"
_GENERATOR = "covmerge view "
_SCRIPTS = ("prediction.js", "recipe.js", "view.js")  # each script uses those before it


def check_page(path: Path, *, overwrite: bool = False) -> None:
    """Check that a page can be written: to a new file, over an earlier page, or with `overwrite`."""
    check_place(path, FILE_NAME, "page of weights", _GENERATOR, overwrite=overwrite)


def write_html(scene: Scene, path: Path, *, overwrite: bool = False) -> None:
    """Write the whole page, or leave everything unchanged."""
    check_page(path, overwrite=overwrite)
    replace_file(path, render(scene))


def render(scene: Scene) -> str:
    """Return the page of a scene.

    The page's security policy allows only this style and this script, by their hashes. Names from
    checkpoints are only in the data, which has no `<`.
    """
    style = _colours() + _part("view.css")
    # There is one script, because a page that is opened as a file may not import others.
    script = re.sub(r"(?m)^(export |import .*\n)", "", "".join(map(_part, _SCRIPTS)))
    data = json.dumps(scene.as_json(), allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = {
        "generator": f"{_GENERATOR}{__version__}",
        "policy": policy,
        "style": style,
        "script": script,
        "data": data,
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: filled[found[1]], _part("index.html"))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return (files("covmerge.front.viewer") / "page" / name).read_text(encoding="utf-8")


def _colours() -> str:
    """Return the report's colours, for light and dark backgrounds."""
    light = " ".join(f"--{name}: {colour.light};" for name, colour in COLOURS.items())
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in COLOURS.items())
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
    )
