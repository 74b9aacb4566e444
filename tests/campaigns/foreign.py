"""Merges by Fisher information and Gram matrices of another model, expert or shape, and of damaged files.

    python -m tests.campaigns.foreign --count 200

Statistics are written as `covmerge collect` writes them, of random numbers; what they give is typed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics.file import Kind, StatisticsFile
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from tests.campaigns import formats, outcomes
from tests.campaigns.merged import command, plain, verdict
from tests.campaigns.outcomes import Tensors

_FLOOR = 1e-10
_END = ".covstats.safetensors"
_KINDS = (*["right"] * 4, "swapped", "other model", "other shape", "other statistic")
_KINDS += ("changed since", "values", "damaged")
# Methods, the statistic that each needs, and their parameters.
_METHODS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "fisher": ("fisher", {"floor": _FLOOR, "floor_how": "add", "normalize": False}),
    "regmean": ("gram", {"off_diagonal": 0.5, "ridge": 0.0}),
    "lot": ("gram", {}),
}


def _model(shape: tuple[int, int], near: Tensors | None, generator: torch.Generator) -> Tensors:
    names = [f"layers.{n}.mlp.up_proj.weight" for n in range(2)]
    if near is None:
        return {name: torch.randn(shape, generator=generator) for name in names}
    return {n: near[n] + 0.01 * torch.randn(shape, generator=generator) for n in names}


def _save(
    folder: Path, name: str, own: Tensors, method: str, kind: Kind, generator: torch.Generator
) -> None:
    """Save an expert with its statistics, as the method wants them."""
    plain(folder / f"{name}.safetensors", own)
    values: dict[str, Tensor] = {}
    for key, weight in own.items():
        if kind == "fisher":
            values[key] = torch.rand(weight.shape, generator=generator) + 0.1
        else:  # of more inputs than a row has
            inputs = torch.randn(100, weight.shape[1], generator=generator)
            values[key] = inputs.mT @ inputs / 100
    with closing(open_checkpoint(folder / f"{name}.safetensors")) as checkpoint:
        held = [Statistic((n,), 100 * value, rows=100) for n, value in values.items()]
        if kind == "gram" and bool(torch.rand(1, generator=generator) < 0.3):
            held = [Statistic(tuple(values), 100 * next(iter(values.values())), rows=100)]
        contents = Contents(checkpoint, {kind: held}, examples=100)
        write_statistics({folder / f"{name}{_END}": contents}, overwrite=True)


def _read(path: Path, own: Tensors, kind: Kind) -> dict[str, Tensor] | str:
    """What a file still says, or why nothing."""
    try:
        held = load(path.read_bytes())
        with closing(StatisticsFile.open(path)) as file:
            file.check_content()
            aliases = file.about.aliases
        keys = {name: f"{kind}/{name}" for name in own}
        found = {name: held[aliases.get(key, key)] for name, key in keys.items()}
    except Exception as error:
        return repr(error)
    for name, value in found.items():
        d_in = own[name].shape[1]
        wanted = own[name].shape if kind == "fisher" else (d_in, d_in)
        if value.dtype != torch.float32 or value.shape != wanted:
            return f"the {kind} of '{name}' has another shape or dtype"
    return found


def merge(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge by the right statistics, or by such as are those of something else."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    shape = random.choice(((4, 6), (8, 8)))
    base = _model(shape, None, generator)
    plain(folder / "base.safetensors", base)
    experts = {name: _model(shape, base, generator) for name in "ab"}
    method = random.choice([*_METHODS])
    statistic, parameters = _METHODS[method]
    for name, own in experts.items():
        _save(folder, name, own, method, statistic, generator)
    files = {name: folder / f"{name}{_END}" for name in "ab"}
    drawn = random.choice(_KINDS)
    path = files[random.choice("ab")]
    name = path.name[0]
    if drawn == "swapped":
        files = {"a": files["b"], "b": files[random.choice("ab")]}
    elif drawn in ("other model", "other shape"):
        other = _model((5, 7) if drawn == "other shape" else shape, None, generator)
        (folder / "other").mkdir()
        _save(folder / "other", name, other, method, statistic, generator)
        files[name] = folder / "other" / path.name
    elif drawn == "other statistic":  # of the same model, or of another protocol
        others = {own for own in _METHODS if own != method and {own, method} != {"regmean", "lot"}}
        other = random.choice(sorted(others))
        _save(folder, name, experts[name], other, _METHODS[other][0], generator)
    elif drawn == "changed since":
        changed = {key: own.clone() for key, own in experts[name].items()}
        key = random.choice([*changed])
        at = random.randrange(changed[key].numel())
        changed[key].view(-1)[at] += 0.5
        plain(folder / f"{name}.safetensors", changed)
    elif drawn == "values":
        data, body = (
            path.read_bytes(),
            random.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xbf")),
        )
        at = len(data) - 4 * random.randrange(1, 8)
        path.write_bytes(data[:at] + body + data[at + 4 :])
    elif drawn == "damaged":
        path.write_bytes(formats.change(path.name, path.read_bytes(), random))
    read = {n: _read(folder / f"{n}{_END}", own, statistic) for n, own in experts.items()}
    known = drawn in ("right", "values", "damaged")
    weights = {n: random.choice((1.0, 1.0, 0.5, 2.0)) for n in "ab"}
    values = f"the statistics are of {drawn}"
    if known:
        values = _expected(base, experts, read, weights, method)
    told = {
        "base": str(folder / "base.safetensors"),
        "experts": {
            n: {
                "source": str(folder / f"{n}.safetensors"),
                "statistics": str(files[n]),
                "weight": weights[n],
            }
            for n in "ab"
        },
        "method": method,
        "parameters": parameters,
    }
    (folder / "recipe.yml").write_text(json.dumps(told))
    ended = command("merge", folder / "recipe.yml", folder / "out")
    names = {f"a{_END}", f"b{_END}", "expert 'a'", "expert 'b'"}
    return verdict(ended, folder / "out", values, names, right=drawn == "right")


def _expected(
    base: Tensors,
    experts: Mapping[str, Tensors],
    read: Mapping[str, Tensors | str],
    weights: Mapping[str, float],
    method: str,
) -> dict[str, Tensor] | str:
    """The merge in float64, by the equations of the papers."""
    known: dict[str, Tensors] = {}
    for expert, told in read.items():
        if isinstance(told, str):
            return told
        known[expert] = told
    result: dict[str, Tensor] = {}
    for name, start in base.items():
        moved = {e: own[name].double() - start.double() for e, own in experts.items()}
        held = {e: weights[e] * own[name].double() for e, own in known.items()}
        if method == "fisher":
            held = {e: own + weights[e] * _FLOOR for e, own in held.items()}
            above = sum(own * moved[e] for e, own in held.items())
            result[name] = start.double() + above / sum(held.values())
            continue
        share = _METHODS[method][1].get("off_diagonal", 1.0)
        held = {e: share * own + (1 - share) * own.diag().diag() for e, own in held.items()}
        above = sum(moved[e] @ own for e, own in held.items())
        result[name] = start.double() + above @ torch.linalg.inv(sum(held.values()))
    return result


KINDS: dict[str, outcomes.Kind] = {
    "statistics of another model": merge,
}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
