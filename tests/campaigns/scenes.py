"""What the campaign of faults merges: small checkpoints, in every form of output."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load, save, save_file
from torch import Tensor

from tests.campaigns.outcomes import average

EXPERTS = ("a", "b")
LAYERS, WIDTH = 8, 16

Digests = Mapping[str, str]


@dataclass(frozen=True)
class Form:
    """A kind of output.

    Attributes:
        recipe: what the recipe says beside base and experts.
        make: writes `base` and the experts into a folder.
        command: the command line, of the names of what lies there.
        executors: who can do it; (): any.
        resumes: whether the command can go on with what was begun.
        models: folders of the output that are models; "": itself.
        stored: whether the output lies in a bucket (`buckets.py`).
        mean: whether the output is the experts' mean, and is compared with one computed in float64.
    """

    recipe: Mapping[str, Any]
    make: Callable[[Path], None]
    command: tuple[str, ...] = ("merge", "{recipe}", "{out}")
    executors: tuple[str, ...] = ()
    resumes: bool = True
    models: tuple[str, ...] = ("",)
    stored: bool = False
    mean: bool = False


def _plain(folder: Path, head: int = 0) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {
        f"layers.{n}.proj.weight": torch.randn(WIDTH, WIDTH, generator=generator)
        for n in range(LAYERS)
    }
    base["embed_tokens.weight"] = torch.randn(4 * WIDTH, WIDTH, generator=generator)
    base["norm.weight"] = torch.ones(WIDTH)
    (folder / "base").mkdir()
    save_file(base, folder / "base" / "model.safetensors", metadata={"format": "pt"})
    (folder / "base" / "config.json").write_text(json.dumps({"hidden_size": WIDTH}))
    (folder / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    for name in EXPERTS:
        own = {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        if head:
            own["classifier.weight"] = torch.randn(head, WIDTH, generator=generator)
        save_file(own, folder / f"{name}.safetensors")


def _with_heads(folder: Path) -> None:
    _plain(folder, head=3)


def _llama(folder: Path) -> None:
    from tests.quantised.models import llama

    for seed, name in enumerate(("base", *EXPERTS)):
        model = llama(seed, num_hidden_layers=2)
        model.save_pretrained(folder / name)
        for other in folder.glob(f"{name}/*"):
            if other.name not in ("model.safetensors", "config.json"):
                other.unlink()
    for name in EXPERTS:  # one file each, like those of the other forms
        (folder / name / "model.safetensors").rename(folder / f"{name}.safetensors")
        shutil.rmtree(folder / name)


FORMS = {
    "model": Form({"method": "ace"}, _plain),
    "average": Form({"method": "average"}, _plain, mean=True),
    "shards": Form({"method": "ties", "output": {"shard_size": "3KB"}}, _plain),
    "adapter": Form({"method": "average", "output": {"format": "adapter", "rank": 2}}, _plain),
    "masks": Form({"method": "emr"}, _plain),
    "heads": Form({"method": "average"}, _with_heads),
    "quantised": Form({"method": "average", "output": {"quantise": "fp8-channel"}}, _llama),
    "extracted": Form(
        {"method": "average"},
        _plain,
        ("extract", "{base}", "{expert}", "{out}", "--rank", "2"),
        ("threads", "processes"),
    ),
    "compared": Form(
        {"method": "average"},
        _plain,
        ("compare", "{recipe}", "--methods", "average,ties", "--out", "{out}"),
        ("threads", "processes"),
        resumes=False,
        models=("average", "ties"),
    ),
    "bucket": Form(
        {"method": "ties", "output": {"shard_size": "6KB"}},
        _plain,
        executors=("threads", "processes"),
        stored=True,
    ),
}


class Scene:
    """One form, laid out in a folder: sources, a recipe, and the place of the output.

    Args:
        name: of the form.
        folder: empty.
        place: where the output is written, on a disk of its own perhaps.

    Attributes:
        out: the output.
        target: what the command line calls it.
        environment: variables that the command line is to have.
        expected: what an undisturbed merge writes, by file its SHA-256; whoever ran one sets it.
        changed: the same over the expert that `variant` is.
        variant: other weights of the first expert, of the same size.
    """

    def __init__(self, name: str, folder: Path, place: Path) -> None:
        self.name = name
        self.form = FORMS[name]
        self.inputs = folder / "in"
        self.inputs.mkdir()
        self.form.make(self.inputs)
        sources = {name: f"./{name}.safetensors" for name in EXPERTS}
        recipe = {"base": "./base", "experts": sources, **self.form.recipe}
        self.recipe = self.inputs / "recipe.yml"
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.out = place / "out"
        self.target = str(self.out)
        self.environment: dict[str, str] = {}
        self.partial = place / ".out.covmerge-partial"
        self.expected: Digests = {}
        self.changed: Digests = {}
        self.kept = {path: path.read_bytes() for path in self.inputs.rglob("*") if path.is_file()}
        self.expert = self.inputs / f"{EXPERTS[0]}.safetensors"
        self.variant = _other(self.kept[self.expert])

    def arguments(self, *more: object) -> list[str]:
        """Return the command line."""
        base = self.inputs / "base"
        names = {"recipe": self.recipe, "out": self.target, "base": base, "expert": self.expert}
        given = [word.format(**names) for word in self.form.command]
        anew = {} if self.form.resumes else {"--resume": "--overwrite"}
        return [*given, *dict.fromkeys(anew.get(str(own), str(own)) for own in more)]

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the experts in float64."""
        return average(*(load(self.kept[self.inputs / f"{name}.safetensors"]) for name in EXPERTS))

    def look(self) -> None:
        """See what is there after processes have ended, where `out` does not say it by itself."""

    def strange(self) -> str | None:
        """Return what is there that may not be, beside the output and the work; None: nothing."""
        beside = {path.name for path in self.out.parent.iterdir()}
        strange = sorted(beside - {self.out.name, self.partial.name})
        return f"left {strange}" if strange else None

    def left(self) -> bool:
        """Whether there is work on the output, or what remains of it."""
        return self.partial.exists()

    def intact(self) -> str | None:
        """Return what of the sources is not what it was; None: nothing."""
        found = {path for path in self.inputs.rglob("*") if path.is_file()}
        strange = sorted(path.name for path in found.symmetric_difference(self.kept))
        strange += [p.name for p in found & self.kept.keys() if p.read_bytes() != self.kept[p]]
        return f"sources changed: {strange}" if strange else None

    def restore(self) -> None:
        """Put the sources back, as whose they were."""
        owner = self.inputs.stat()
        for path in list(self.inputs.rglob("*")):
            if path.is_symlink():
                path.unlink()
            else:
                path.chmod(0o755 if path.is_dir() else 0o644)
        for path in [path for path in self.inputs.rglob("*") if path.is_file()]:
            if path not in self.kept:
                path.unlink()
        for path, content in self.kept.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                os.chown(path, owner.st_uid, owner.st_gid)

    def clear(self) -> None:
        """Remove the output and the work on it."""
        for folder in (self.out, self.partial):
            if folder.exists():
                for path in (folder, *folder.rglob("*")):
                    path.chmod(0o755)
                shutil.rmtree(folder)


def digests(folder: Path) -> Digests:
    """By file of a folder its SHA-256, but for the table of a comparison, which tells how long it took."""
    found = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        str(path.relative_to(folder)): hashlib.sha256(content).hexdigest()
        for path, content in found.items()
        if not (path == folder / "covmerge.json" and b'"comparison"' in content)
    }


def _other(content: bytes) -> bytes:
    generator = torch.Generator().manual_seed(7)

    def moved(own: Tensor) -> Tensor:
        return own + 0.01 * torch.randn(own.shape, generator=generator).to(own.dtype)

    return save({name: moved(own) for name, own in load(content).items()}, _metadata(content))


def _metadata(content: bytes) -> dict[str, str] | None:
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] | None = json.loads(content[8 : 8 + length]).get("__metadata__")
    return found
