"""Small models whose layers have two shapes, as tensors and as files, and their plans."""

from math import isfinite

import pytest
import torch
from safetensors.torch import save_file

from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import parse_recipe
from covmerge.run.sources import open_checkpoints


def models(layers=4, experts=3, dtype=torch.float32, unlike=()):
    """Models of two shapes of matrices, with a bias between them, and an embedding."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (40, 16)}
    for n in range(layers):
        shapes[f"model.layers.{n}.self_attn.q_proj.weight"] = (24, 24)
        shapes[f"model.layers.{n}.self_attn.q_proj.bias"] = (24,)
        shapes[f"model.layers.{n}.self_attn.v_proj.weight"] = (24, 24)
        shapes[f"model.layers.{n}.mlp.up_proj.weight"] = (48, 24)
    base = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    moved = {}
    for t in range(experts):
        moved[f"e{t}"] = {
            # The gate fires in every second layer.
            name: (
                w
                + 0.02
                * (5**t if ".1." in name or ".3." in name else 1)
                * torch.randn(w.shape, generator=draw)
            ).to(dtype)
            for name, w in base.items()
        }
    for expert, name, what in unlike:
        moved[expert][name] = what(base[name])
    return base, moved


def saved(folder, base, experts):
    """The same as files."""
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.safetensors" for name in experts}
    save_file(base, folder / "base.safetensors")
    for name, path in paths.items():
        save_file(experts[name], path)
    return folder / "base.safetensors", paths


def near(one, other, *, but=()):
    """Hold two documents of JSON to each other: numbers to rounding, all else as it is."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key not in but:
                near(one[key], other[key], but=but)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            near(a, b, but=but)
    elif isinstance(one, float) and isfinite(one):
        assert one == pytest.approx(other, rel=2e-3, abs=1e-9)
    else:
        assert one == other


def plan(base, experts, method="ace", **more):
    given = {"base": "base", "experts": {e: e for e in experts}, "method": method, **more}
    with open_checkpoints(base, experts, {}) as opened:
        return build_plans([parse_recipe(given)], opened.base, opened.experts, {})[0]
