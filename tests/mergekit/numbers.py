"""Normal numbers that are the same on every machine, for the models that goldens were made of.

`torch.randn` rounds its logarithms and cosines by the processor's instructions. So what it drew where
mergekit made the goldens is kept. Numbers of any other seed are drawn anew; no golden depends on them.

`python -m tests.mergekit.numbers` writes the file again. The goldens are then made again too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = Path(__file__).parent.parent / "golden" / "mergekit_numbers.safetensors"
drawn: dict[int, Tensor] = {}


def normal(shape: tuple[int, ...], *key: object) -> Tensor:
    """Return the numbers of this key, of mean 0 and variance 1."""
    return normals([shape], *key)[0]


def normals(shapes: Sequence[tuple[int, ...]], *key: object) -> list[Tensor]:
    """Return several tensors of one key, drawn one after the other."""
    seed, sizes = zlib.crc32("/".join(map(str, key)).encode()), [prod(own) for own in shapes]
    kept = _kept().get(seed)
    if kept is None or len(kept) != sum(sizes):
        generator = torch.Generator().manual_seed(seed)
        kept = torch.cat([torch.randn(own, generator=generator).flatten() for own in shapes])
        drawn[seed] = kept
    parts = kept.clone().split(sizes)
    return [part.reshape(own) for part, own in zip(parts, shapes, strict=True)]


@cache
def _kept() -> dict[int, Tensor]:
    """What is kept, by seed."""
    if not FILE.is_file():
        return {}
    stored = load_file(FILE)
    parts = stored["numbers"].split(stored["counts"].tolist())
    return dict(zip(stored["seeds"].tolist(), parts, strict=True))


def main() -> None:
    """Keep what the models of the goldens are made of."""
    from tests.mergekit import models, token_generator
    from tests.mergekit.numbers import drawn  # not this module, which is `__main__`

    FILE.unlink(missing_ok=True)
    for save_models in (models.save_models, token_generator.save_models):
        with TemporaryDirectory() as folder:
            save_models(Path(folder))
    stored = {
        "seeds": torch.tensor(list(drawn)),
        "counts": torch.tensor([len(own) for own in drawn.values()]),
        "numbers": torch.cat(list(drawn.values())),
    }
    save_file(stored, FILE)
    print(FILE, FILE.stat().st_size)


if __name__ == "__main__":
    main()
