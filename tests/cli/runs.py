"""Tiny checkpoints, and the command line run on them in this process."""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.front.cli import app
from covmerge.methods import registry
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        """stdout, which must be one JSON value and nothing else."""
        return json.loads(self.stdout)


def covmerge(*args, code=0):
    """Run `covmerge ARGS`; anything but the expected exit code fails with the output."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="covmerge")
    ran = Ran(result.exit_code, result.stdout, result.stderr)
    unexpected = result.exception if not isinstance(result.exception, SystemExit) else None
    if unexpected is not None:
        raise unexpected
    assert ran.code == code, ran
    return ran


def words(text):
    """The text without the line breaks that the width of a table makes."""
    return " ".join(text.split())


def save_plain(folder: Path, experts=("a", "b"), layers=2, width=8, growth=4.0):
    """Checkpoints of two matrices, a norm and an embedding, one file each, without a config."""
    generator = torch.Generator().manual_seed(0)
    base = {
        **{
            f"layers.{n}.mlp.up_proj.weight": torch.randn(width, width, generator=generator)
            for n in range(layers)
        },
        "layers.0.input_layernorm.weight": torch.ones(width),
        "embed_tokens.weight": torch.randn(2 * width, width, generator=generator),
    }
    save_file(base, folder / "base.safetensors")
    for number, name in enumerate(experts):
        moved = {
            n: w + 0.01 * growth**number * torch.randn(w.shape, generator=generator)
            for n, w in base.items()
        }
        save_file(moved, folder / f"{name}.safetensors")
    return folder


def flags(folder: Path, experts=("a", "b")):
    """The flags that name the checkpoints of `save_plain`."""
    named = [f"--expert={name}={folder / name}.safetensors" for name in experts]
    return ["--base", folder / "base.safetensors", *named]


def write_recipe(folder: Path, text="", experts=("a", "b")):
    """A recipe file beside the checkpoints of `save_plain`."""
    lines = ["base: ./base.safetensors", "experts:"]
    lines += [f"  {name}: ./{name}.safetensors" for name in experts]
    path = folder / "recipe.yml"
    path.write_text("\n".join([*lines, text]) + "\n", encoding="utf-8")
    return path


def statistics_for(name, folder: Path, experts=("a", "b")):
    """Statistics files for a method that needs them: random, of the checkpoints of `save_plain`."""
    method = registry.get(name)
    if method.data == "none":
        return {}
    generator = torch.Generator().manual_seed(1)
    files = {}
    for expert in experts:
        path = folder / f"{expert}.covstats.safetensors"
        with closing(open_checkpoint(folder / f"{expert}.safetensors")) as checkpoint:
            statistics = [
                Statistic((tensor,), _random(method.data, header.shape, generator), rows=100)
                for tensor, header in checkpoint.headers.items()
                if method.data == "fisher" or tensor.endswith("up_proj.weight")
            ]
            contents = Contents(checkpoint, {method.data: statistics}, examples=100)
            write_statistics({path: contents}, overwrite=True)
        files[expert] = path
    return files


def _random(kind, shape, generator):
    if kind == "fisher":
        return torch.rand(shape, generator=generator) + 0.1
    inputs = torch.randn(100, shape[-1], generator=generator)
    return inputs.T @ inputs
