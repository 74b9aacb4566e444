"""A merge that is refused with an advice, and the one that follows it."""

import re
from pathlib import Path

import yaml
from safetensors.torch import load_file

from tests.cli.runs import covmerge, words


def told(said: str, *args: object, code: int = 2) -> re.Match[str]:
    """Run `covmerge ARGS`, which fails with an advice: words of its message."""
    text = words(covmerge(*args, code=code).stderr)
    found = re.search(said, text)
    assert found is not None, text
    return found


def noted(said: str, text: object) -> None:
    """Check that a text, or one of several notes, has words of a message."""
    texts = [text] if isinstance(text, str) else list(text)
    assert any(re.search(said, words(str(one))) for one in texts), texts


def recipe(folder: Path, **keys: object) -> Path:
    """A recipe file of `base` and experts in a folder: `a`, unless others are given."""
    file = folder / "recipe.yml"
    given = {"base": "./base", "experts": {"a": "./a"}, "method": "average"} | keys
    file.write_text(yaml.safe_dump({k: v for k, v in given.items() if v is not None}))
    return file


def merged(*args: object, out: Path, name: str = "model.safetensors") -> dict:
    """What `covmerge merge ARGS OUT` writes, which is verified."""
    covmerge("merge", *args, out)
    covmerge("verify", out)
    return load_file(out / name) if name else {}
