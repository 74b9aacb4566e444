"""Merges by Fisher information of another model, expert or shape, and of damaged files.

    python -m tests.campaigns.foreign --count 200

Statistics are written as `covmerge collect` writes them, of random numbers; what they give is typed here.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import struct
import sys
from contextlib import closing, redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import torch
from safetensors.torch import load, load_file
from torch import Tensor

import covmerge
from covmerge.checkpoints import open_checkpoint
from covmerge.methods import registry
from covmerge.statistics import Generated, of_base
from covmerge.statistics.write import Contents, Statistic, write_statistics
from tests.campaigns import formats, outcomes
from tests.campaigns.merged import command, plain, verdict
from tests.campaigns.outcomes import Tensors
from tests.e2e.models import build
from tests.statistics.models import save_family

_FLOOR = 1e-10
_END = ".covstats.safetensors"
_KINDS = ("right", "swapped", "other model", "other shape", "changed since", "values", "damaged")


def _model(shape: tuple[int, int], near: Tensors | None, generator: torch.Generator) -> Tensors:
    names = [f"layers.{n}.mlp.up_proj.weight" for n in range(2)]
    if near is None:
        return {name: torch.randn(shape, generator=generator) for name in names}
    return {n: near[n] + 0.01 * torch.randn(shape, generator=generator) for n in names}


def _save(folder: Path, name: str, own: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Save an expert with its Fisher information, and return that."""
    plain(folder / f"{name}.safetensors", own)
    values = {n: torch.rand(w.shape, generator=generator) + 0.1 for n, w in own.items()}
    with closing(open_checkpoint(folder / f"{name}.safetensors")) as checkpoint:
        held = [Statistic((n,), value, rows=100) for n, value in values.items()]
        protocol = registry.get("fisher").protocol
        contents = Contents(checkpoint, {"fisher": held}, examples=100, protocol=protocol)
        write_statistics({folder / f"{name}{_END}": contents}, overwrite=True)


def _read(path: Path, own: Tensors) -> dict[str, Tensor] | str:
    """What a damaged file still says, or why nothing."""
    try:
        held = load(path.read_bytes())
        found = {name: held[f"fisher/{name}"] for name in own}
    except Exception as error:
        return repr(error)
    for name, value in found.items():
        if (
            not value.is_floating_point()
            or value.shape != own[name].shape
            or not bool((value >= 0).all() & value.isfinite().all())
        ):
            return f"'{name}' is no Fisher information of it"
    return found


def merge(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge by the right statistics, or by such as are those of something else."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    shape = random.choice(((4, 6), (8, 8)))
    base = _model(shape, None, generator)
    plain(folder / "base.safetensors", base)
    experts = {name: _model(shape, base, generator) for name in "ab"}
    for name, own in experts.items():
        _save(folder, name, own, generator)
    files = {name: folder / f"{name}{_END}" for name in "ab"}
    kind = random.choice(_KINDS)
    path = files[random.choice("ab")]
    name = path.name[0]
    if kind == "swapped":
        files = {"a": files["b"], "b": files[random.choice("ab")]}
    elif kind in ("other model", "other shape"):
        other = _model((5, 7) if kind == "other shape" else shape, None, generator)
        (folder / "other").mkdir()
        _save(folder / "other", name, other, generator)
        files[name] = folder / "other" / path.name
    elif kind == "changed since":
        changed = {key: own.clone() for key, own in experts[name].items()}
        key = random.choice([*changed])
        at = random.randrange(changed[key].numel())
        changed[key].view(-1)[at] += 0.5
        plain(folder / f"{name}.safetensors", changed)
    elif kind == "values":
        data, body = (
            path.read_bytes(),
            random.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xbf")),
        )
        at = len(data) - 4 * random.randrange(1, 8)
        path.write_bytes(data[:at] + body + data[at + 4 :])
    elif kind == "damaged":
        path.write_bytes(formats.change(path.name, path.read_bytes(), random))
    fisher = {expert: _read(folder / f"{expert}{_END}", own) for expert, own in experts.items()}
    known = kind in ("right", "values", "damaged")
    values = _expected(base, experts, fisher) if known else f"the statistics are of {kind}"
    told = {
        "base": str(folder / "base.safetensors"),
        "experts": {
            n: {"source": str(folder / f"{n}.safetensors"), "statistics": str(files[n])}
            for n in "ab"
        },
        "method": "fisher",
        "parameters": {"floor": _FLOOR, "floor_how": "add", "normalize": False},
    }
    (folder / "recipe.yml").write_text(json.dumps(told))
    ended = command("merge", folder / "recipe.yml", folder / "out")
    names = {f"a{_END}", f"b{_END}", "expert 'a'", "expert 'b'"}
    return verdict(ended, folder / "out", values, names, right=kind == "right")


def _expected(
    base: Tensors, experts: dict[str, Tensors], fisher: dict[str, dict[str, Tensor] | str]
) -> dict[str, Tensor] | str:
    result: dict[str, Tensor] = {}
    for name, start in base.items():
        above, below = torch.zeros(start.shape).double(), torch.zeros(start.shape).double()
        for expert, own in experts.items():
            told = fisher[expert]
            if isinstance(told, str):
                return told
            weight = told[name].double() + _FLOOR
            above += weight * (own[name].double() - start.double())
            below += weight
        result[name] = start.double() + above / below
    return result


@cache
def _family() -> tuple[Path, Path, dict[str, bytes]]:
    """A base with two experts, their undisturbed merge, and statistics by whose base they are."""
    home = Path(mkdtemp(prefix="campaign-family-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    base, experts = save_family(build("llama"), home)
    found: dict[str, bytes] = {}
    for name, source in (("base", base), *experts.items()):
        with redirect_stderr(StringIO()):
            covmerge.collect(source, Generated("random"), home / f"{name}{_END}")
        found[name] = (home / f"{name}{_END}").read_bytes()
    out = home / "right"
    covmerge.merge(base, experts, "auto", out, base_statistics=home / f"base{_END}")
    told = {
        "base": str(base),
        "experts": {name: str(path) for name, path in experts.items()},
        "method": "auto",
        "base_statistics": "random",
    }
    (home / "recipe.yml").write_text(json.dumps(told))
    return home / "recipe.yml", out, found


def poison(right: bytes, others: list[bytes], random: Random) -> bytes:
    """Return what may lie in the cache in the place of a base's statistics."""
    start = 8 + int.from_bytes(right[:8], "little")
    kind = random.choice(("right", "short", "value", "header", "other model", "zeros"))
    if kind == "short":
        return right[: random.randrange(len(right))]
    if kind == "value":
        at = random.randrange(start, len(right) - 3) // 4 * 4
        drawn = random.choice((float("nan"), float("inf"), -1e3, 0.5, 0.0))
        return right[:at] + struct.pack("<f", drawn) + right[at + 4 :]
    if kind == "header":
        at = random.randrange(start)
        return right[:at] + bytes([right[at] ^ 1 << random.randrange(8)]) + right[at + 1 :]
    if kind == "other model":
        return random.choice(others)
    return right[:start] + bytes(len(right) - start) if kind == "zeros" else right


def cached(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge with a damaged entry in the cache, or what a killed process left there.

    The right values are of a merge whose statistics never lay in a cache.
    """
    recipe, right, statistics = _family()
    before = os.environ.get("COVMERGE_CACHE")
    os.environ["COVMERGE_CACHE"] = str(folder / "cache")
    try:
        with closing(open_checkpoint(recipe.parent / "base")) as base:
            path = of_base._path(base, torch.device("cpu"))
        path.parent.mkdir(parents=True)
        others = [own for name, own in statistics.items() if name != "base"]
        path.write_bytes(poison(statistics["base"], others, random))
        if random.random() < 0.3:
            (path.parent / f".making-{path.name.removesuffix(_END)}").mkdir()
        ended = command("merge", recipe, folder / "out")
        values = load_file(right / "model.safetensors")
        return verdict(ended, folder / "out", values, {path.name}, right=True)
    finally:
        os.environ.pop("COVMERGE_CACHE")
        if before is not None:
            os.environ["COVMERGE_CACHE"] = before


KINDS: dict[str, outcomes.Kind] = {
    "statistics of another model": merge,
    "cached statistics of the base": cached,
}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
