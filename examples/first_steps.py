"""What an installation must be able to do, with torch alone: merge a tiny model, in memory and to disk.

Run it by `python examples/first_steps.py`.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import covmerge


def model(seed: int, base: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Two layers and a norm; an expert is its base with a small update."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.mlp.up_proj.weight": (8, 4), "layers.0.mlp.down_proj.weight": (4, 8)}
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    drawn["norm.weight"] = torch.ones(4)
    return drawn if base is None else {n: w + 0.05 * drawn[n] for n, w in base.items()}


def main() -> None:
    """Merge by two methods, in memory and on disk, which must agree."""
    base = model(0)
    experts = {"code": model(1, base), "math": model(2, base)}
    kept = covmerge.merge(base, experts, "ace").tensors
    average = covmerge.merge(base, experts, "average").tensors
    for name, merged in average.items():
        torch.testing.assert_close(merged, (experts["code"][name] + experts["math"][name]) / 2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, tensors in {"base": base, **experts}.items():
            save_file(tensors, folder / f"{name}.safetensors")
        sources = {name: folder / f"{name}.safetensors" for name in experts}
        covmerge.merge(folder / "base.safetensors", sources, "ace", folder / "merged")
        covmerge.verify(folder / "merged").raise_if_failed()
        written = load_file(folder / "merged" / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in kept.items())
    print(f"covmerge {covmerge.__version__} merges: {len(kept)} tensors, in memory as on disk")


if __name__ == "__main__":
    main()
