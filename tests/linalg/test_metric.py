"""Spectra of ΔC^½ by every route are those of the product itself."""

import pytest
import torch

from covmerge.maths.linalg.metric import Metric
from covmerge.maths.linalg.spectral import RankRule, rank_tolerance

SHAPES = [(12, 30), (30, 12), (20, 20)]


def covariance(n, rows, dtype=torch.float64, scale=7.0):
    z = torch.randn(rows, n, generator=torch.manual_seed(n), dtype=torch.float64)
    z *= 0.8 ** torch.arange(n)
    return (scale * z.mT @ z / rows).to(dtype)


def drawn(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def root_of(inputs):
    values, vectors = torch.linalg.eigh(inputs.double() / inputs.double().diagonal().mean())
    return vectors * values.clamp_min(0).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [5, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spectra_are_those_of_the_product(shape, rows, dtype):
    inputs = covariance(shape[1], rows, dtype)
    metric, update = Metric.of(inputs), drawn(shape, dtype)
    left, sigma, _ = torch.linalg.svd(update.double() @ root_of(inputs), full_matrices=False)
    found = metric.spectrum(update, RankRule(rank_tolerance(shape, dtype, None)))
    kept = found.sigma
    rank = min(*shape, rows)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    # Beyond the rank of C is the root of its rounding, which a Cholesky factor may keep.
    rounding = 20 * torch.finfo(dtype).eps ** 0.5
    assert len(kept) >= rank and bool((kept[rank:] < rounding * kept[0]).all())
    torch.testing.assert_close(kept[:rank], sigma[:rank], rtol=10 * tolerance, atol=0.0)
    lift = torch.full_like(kept, 0.5)
    lift[:rank] = 1.0 / (1.0 + kept[:rank])
    image = found.lifted(lift, 0.5)
    main = left[:, :rank]
    wanted = main * (1.0 / (1.0 + sigma[:rank]) - 0.5) @ main.mT @ update.double()
    wanted += 0.5 * update.double()
    torch.testing.assert_close(image.double(), wanted, rtol=0, atol=tolerance * float(sigma[0]))
    whole = metric.nuclear_norm(update)
    assert whole == pytest.approx(
        float(sigma[:rank].sum()), rel=10 * tolerance + (len(sigma) - rank) * rounding
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 300)], ids=str)
def test_dots_block_by_block(shape, dtype):
    updates = [drawn(shape, dtype, seed) for seed in range(3)]
    inputs = covariance(shape[1], 50, dtype)
    found = Metric.of(inputs).dots(updates)
    root = root_of(inputs)
    flat = torch.stack([(update.double() @ root).flatten() for update in updates])
    wanted = flat @ flat.mT
    assert float((found - wanted).abs().max() / wanted.max()) < (
        1e-5 if dtype == torch.float32 else 1e-12
    )
