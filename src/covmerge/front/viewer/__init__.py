"""One HTML page on which users weight experts and see at once how much of each is retained.

scene  the page's data on base, experts and a merged model, measured once
page   its parts: the text, its style, and scripts that predict and write recipes
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from shlex import quote

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.base.version import __version__
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest, recorded_in
from covmerge.files.stores.disk import replace_file
from covmerge.front.reporting.job import check_place
from covmerge.front.reporting.style import COLOURS
from covmerge.front.viewer.scene import Scene
from covmerge.plan.recipe import Recipe, load_recipe, parse_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import InspectJob, open_merged
from covmerge.run.inspection.result import Inspection
from covmerge.run.sources import OpenCheckpoints, open_recipe

# Measure base, experts and a merged model for the page.


@dataclass(frozen=True)
class ViewJob:
    """The sources to inspect, and the options of the run."""

    path: Path
    options: RunOptions = field(default_factory=RunOptions)

    def run(self) -> Scene:
        """Read every matrix once, and return the scene."""
        if not self.path.exists():
            raise InputError(
                f"{self.path} is not there: name a folder that `covmerge merge` wrote, or a recipe file"
            )
        if not self.path.is_dir():
            recipe = load_recipe(self.path)
            with open_recipe(recipe) as checkpoints:
                return self._scene(recipe, checkpoints, self.path.name)
        manifest = read_manifest(self.path)
        recipe = parse_recipe(manifest["recipe"], origin=str(self.path / MANIFEST_NAME))
        with recorded_in(self.path / MANIFEST_NAME), open_recipe(recipe) as checkpoints:
            return self._scene(recipe, checkpoints, self.path.resolve().name, self.path)

    def _scene(
        self, recipe: Recipe, checkpoints: OpenCheckpoints, title: str, out: Path | None = None
    ) -> Scene:
        if recipe.slices or recipe.moe:
            made = "stacks layers anew ('slices')" if recipe.slices else "makes a mixture ('moe')"
            raise InputError(
                f"{self.path}: the recipe {made}, and a page weighs the experts of whole models: look at "
                f"it by `covmerge {'inspect' if out is None else 'report'} {quote(str(self.path))}`"
            )
        job = InspectJob(recipe=recipe, spectra="none", options=self.options, quadratics=True)
        if out is None:
            inspection = job.run(checkpoints)
        else:
            with open_merged(out, checkpoints.base) as output:
                inspection = job.run(checkpoints, merged=output)
        _check(inspection)
        sources = {"": _place(recipe.base or "", checkpoints.base.identity()["kind"])}
        for name, expert in recipe.experts.items():
            if name in inspection.compared:
                kind = checkpoints.experts[name].identity()["kind"]
                sources[name] = _place(expert.source, kind)
        merged = None if out is None else _free("merged", recipe)
        if out is not None and merged is not None and recipe.tokenizer is None:
            sources[merged] = str(out.absolute())
        return Scene(title, recipe, inspection, sources, merged)


def _check(inspection: Inspection) -> None:
    if not inspection.compared:
        text = some((f.text for f in inspection.faults), 1)
        raise InputError(f"no expert fits the base, so that there is nothing to weigh: {text}")
    if not inspection.matrices:
        raise InputError(
            f"{some(inspection.experts)}: no tensor is a matrix of a layer, and nothing is predicted of "
            "others"
        )


def _place(source: str, kind: object) -> str:
    """Return the name of a source for a recipe in any folder."""
    known = kind in ("hub", "remote")
    return source if known else str(Path(source).expanduser().absolute())


def _free(name: str, recipe: Recipe) -> str:
    """Return a name that no expert has."""
    taken = {expert.lower() for expert in recipe.experts}
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)


# The page as one file, which loads nothing.

FILE_NAME = "view.html"
_GENERATOR = "covmerge view "
_SCRIPTS = ("prediction.js", "recipe.js", "view.js")  # each uses those before it


def check_page(path: Path, *, overwrite: bool = False) -> None:
    """Check that a page can be written: to a new file, over an earlier page, or with leave."""
    check_place(path, FILE_NAME, "page of weights", _GENERATOR, overwrite=overwrite)


def write_html(scene: Scene, path: Path, *, overwrite: bool = False) -> None:
    """Write the page whole, or leave everything as it was."""
    check_page(path, overwrite=overwrite)
    replace_file(path, render(scene))


def render(scene: Scene) -> str:
    """Return the page of a scene.

    Its policy allows this style and these scripts, by their hashes, and nothing else. Names of strangers
    are in its data alone, which has no `<`.
    """
    style = _colours() + _part("view.css")
    # One script: a page that is opened as a file may not import others.
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
    light = " ".join(f"--{name}: {colour.light};" for name, colour in COLOURS.items())
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in COLOURS.items())
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
    )
